"""The words of llmgw: frozen values, nothing else."""
