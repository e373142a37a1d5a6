"""What llmgw knows about each inference engine."""
