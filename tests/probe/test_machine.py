"""A look at this machine, at machines that hang, and at cards nobody can use."""
from __future__ import annotations

import os
import platform
import threading

import pytest

from llmgw.domain.command import Outcome
from llmgw.domain.errors import CommandFailed
from llmgw.probe import deadline, gpus, machine
from llmgw.system.process import Processes

UUID = "GPU-00000000-0000-0000-0000-000000000000"


def test_this_machine_is_described(tmp_path):
    facts = machine.probe(str(tmp_path), processes=Processes())
    assert facts.arch == platform.machine() and facts.kernel == platform.release()
    assert facts.cpu_count >= 1 and facts.memory_total_bytes > facts.memory_available_bytes > 0
    assert facts.disk_total_bytes >= facts.disk_free_bytes > 0
    assert facts.libc.startswith(("glibc 2.", "musl")) and facts.python.startswith("3.")


def test_a_folder_that_is_not_there_is_unknown_and_said(tmp_path):
    facts = machine.probe(str(tmp_path / "no"), processes=Processes())
    assert facts.disk_total_bytes == 0 and any("No such file" in sentence for sentence in facts.warnings)


def test_a_question_that_hangs_is_unknown_and_is_not_asked_again_while_it_hangs():
    release, asked = threading.Event(), []

    def hang():
        asked.append(1)
        release.wait(60)
        return "late"
    assert deadline.within(0.05, "dead disk", hang, "unknown") == (
        "unknown", "dead disk: no answer within 0.05 seconds")
    assert deadline.within(0.05, "dead disk", hang, "unknown")[1] == "dead disk: still no answer to an earlier question"
    assert asked == [1]
    release.set()
    deadline._hanging["dead disk"].join(30)
    assert deadline.within(5, "dead disk", lambda: "now", "unknown") == ("now", "")


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("odd"), CommandFailed("no end")])
def test_a_question_that_fails_is_unknown_with_the_reason(error):
    def fail():
        raise error
    answer, problem = deadline.within(5, "thing", fail, 0)
    assert answer == 0 and problem.startswith("thing: ")


def cards(tmp_path, **devices):
    for name, (vendor, kind) in devices.items():
        folder = tmp_path / "pci" / name.replace("_", ":").replace("x", ".")
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
    return str(tmp_path / "pci")


class StandInSmi:
    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def run(self, command, *, timeout, **unused):
        self.asked.append(command.argv)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


NVIDIA = {"0000_01_00x0": ("0x10de", "0x030200")}


def test_stand_in_gpus_are_read_and_excluded_ones_left_out(tmp_path):
    rows = "".join(f"{index}, {UUID[:-1]}{index}, NVIDIA H200, 590.48.01, 9.0, Disabled, 143771 MiB, 0 MiB\n"
                   for index in range(2))
    found = gpus.probe(StandInSmi(Outcome(0, rows, "")), program="/smi", pci=cards(tmp_path, **NVIDIA))
    assert found.driver == "590.48.01" and [gpu.index for gpu in found.gpus] == [0, 1] and found.warnings == ()


def test_stand_in_an_old_driver_is_asked_again_without_what_it_does_not_know(tmp_path):
    smi = StandInSmi(Outcome(2, 'Field "compute_cap" is not a valid field to query.\n', ""),
                     Outcome(0, f"0, {UUID}, Tesla P4, 470.1, [N/A], 7611 MiB, 0 MiB\n", ""))
    assert gpus.probe(smi, program="/smi", pci=cards(tmp_path, **NVIDIA)).gpus[0].name == "Tesla P4"
    assert "compute_cap" not in " ".join(smi.asked[1])


def test_stand_in_a_driver_mismatch_is_a_warning_with_what_to_do(tmp_path):
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161\n"
    found = gpus.probe(StandInSmi(Outcome(18, text, "")), program="/smi", pci=cards(tmp_path, **NVIDIA))
    assert found.gpus == () and "reboot the node" in found.warnings[0]
    assert found.reboot_needed.endswith("driver and library versions differ")


def test_stand_in_a_driver_mismatch_counts_where_the_bus_shows_no_card(tmp_path):
    text = "Failed to initialize NVML: Driver/library version mismatch\n"
    assert gpus.probe(StandInSmi(Outcome(18, text, "")), program="/smi", pci=cards(tmp_path)).reboot_needed


def test_stand_in_a_driver_that_is_not_loaded_needs_no_reboot(tmp_path):
    text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    found = gpus.probe(StandInSmi(Outcome(9, text, "")), program="/smi", pci=cards(tmp_path, **NVIDIA))
    assert found.reboot_needed == "" and "the NVIDIA driver is not loaded" in found.warnings[0]


def test_stand_in_a_driver_that_hangs_is_a_warning(tmp_path):
    smi = StandInSmi(CommandFailed("/smi: no end after 10 seconds, killed"))
    found = gpus.probe(smi, program="/smi", pci=cards(tmp_path, **NVIDIA))
    assert "NVIDIA GPUs cannot be used: /smi: no end" in found.warnings[0]


def test_stand_in_a_gpu_divided_by_mig_is_a_warning(tmp_path):
    row = f"0, {UUID}, NVIDIA H100 80GB HBM3, 590.48.01, 9.0, Enabled, 81559 MiB, 59 MiB\n"
    found = gpus.probe(StandInSmi(Outcome(0, row, "")), program="/smi", pci=cards(tmp_path, **NVIDIA))
    assert found.gpus[0].mig and "divided by MIG" in found.warnings[0]


@pytest.mark.skipif(bool(gpus.find_program()), reason="this machine has nvidia-smi")
def test_a_card_without_a_driver_is_a_warning(tmp_path):
    found = gpus.probe(StandInSmi(), pci=cards(tmp_path, **NVIDIA))
    assert "no driver" in found.warnings[0]


@pytest.mark.parametrize("device, words", [
    ({"0000_03_00x0": ("0x1002", "0x038000")}, "AMD GPU found"), ({"0000_03_00x0": ("0x1002", "0x120000")}, "AMD GPU"),
    ({"0000_03_00x0": ("0x8086", "0x030000")}, "Intel GPU found"), ({"0000_00_02x0": ("0x8086", "0x030000")}, ""),
    ({"0000_00_02x0": ("0x1af4", "0x030000")}, ""), ({"0000_01_00x1": ("0x10de", "0x040300")}, "")],
    ids=["AMD", "AMD accelerator", "Intel card", "Intel in the processor", "virtual", "sound of a GPU"])
def test_cards_that_nobody_can_use_are_a_warning(tmp_path, device, words):
    if gpus.find_program() and not words:
        pytest.skip("this machine has nvidia-smi")
    warnings = gpus.probe(StandInSmi(Outcome(0, "", "")), pci=cards(tmp_path, **device)).warnings
    assert (words in " ".join(warnings)) if words else warnings == ()


def test_no_bus_at_all_is_no_card(tmp_path):
    assert gpus.cards_on_the_bus(str(tmp_path / "no")) == () and os.path.isdir(tmp_path)
