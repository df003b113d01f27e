"""What the machine reaches and which switches are off, and the command that says so."""

import sys

import pytest
import torch
from commands import run

from grpo.config import SettingsError
from grpo.workbench.machine import look, no_compiler
from grpo.workbench.performance.measure import matmul_rate, training_rates
from grpo.workbench.performance.settings import PerformanceSettings
from grpo.workbench.performance.switches import available_cores, switches
from grpo.workbench.spec import ModelSpec

CPU = torch.device("cpu")
TINY = ModelSpec(arch="gpt2", layers=1, width=32, heads=2, context=32)


def found(dtype: torch.dtype = torch.float32) -> dict:
    return {switch.name: switch for switch in switches(CPU, dtype)}


def test_switches_that_are_off_say_what_to_type(monkeypatch):
    monkeypatch.setattr("grpo.workbench.performance.switches.available_cores", lambda: 96)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    now = found()
    assert now["threads"].state == "off" and now["threads"].remedy == "export OMP_NUM_THREADS=96"
    assert now["compile"].state == "off" and "C++ compiler" in now["compile"].found
    assert now["TF32"].state == "not here" and now["fused AdamW"].state == "on"
    assert all(bool(switch.remedy) == (switch.state == "off") for switch in now.values())


def test_native_bf16_is_off_where_precision_says_fp32(monkeypatch):
    monkeypatch.setattr("grpo.model.target._cpu_flags", lambda: {"amx_bf16"})
    assert found()["bf16"].remedy == "--precision bf16" and found()["fused attention"].state == "on"
    lower = found(torch.bfloat16)
    assert lower["bf16"].state == "on" and lower["fused attention"].state == "on"
    monkeypatch.setattr("grpo.model.target._cpu_flags", lambda: set())
    assert found()["bf16"].state == "not here"


def test_a_compiler_is_looked_for(monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)  # anything that can be run
    assert no_compiler(CPU) is None
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "install g++" in no_compiler(CPU)


def test_rates_are_of_the_first_way_and_of_others(monkeypatch):
    settings = PerformanceSettings(TINY, batch_size=2, steps=1, precision="fp32")
    monkeypatch.setattr("grpo.model.target._cpu_flags", lambda: {"amx_bf16"})
    monkeypatch.setattr("grpo.workbench.performance.measure.available_cores", lambda: 2)
    threads = torch.get_num_threads()
    names = [rate.name for rate in training_rates(settings, CPU)]
    assert names == ["as it is, in fp32", "in bf16", f"with {2 if threads < 2 else 1} threads"]
    assert torch.get_num_threads() == threads
    assert matmul_rate(CPU, torch.float32) > 1e6


def test_a_device_is_looked_at():
    machine = look("cpu", "fp32", limit_bytes=2**20)
    assert (machine.device, machine.precision, machine.usable_bytes) == ("cpu", "fp32", 2**20)
    assert "thread" in machine.device_name and available_cores() >= 1
    with pytest.raises(ValueError, match="device is 'cuda:77'"):
        look("cuda:77", "auto")


def test_wrong_settings_name_themselves():
    with pytest.raises(SettingsError, match="batch_size is 0"):
        PerformanceSettings(batch_size=0)


def test_the_command_says_what_is_reached_and_what_is_off(tmp_path):
    arguments = ["--arch", "gpt2", "--layers", "1", "--width", "32", "--heads", "2", "--context", "32"]
    done = run("scripts/check_performance.py", *arguments, "--steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout and "GFLOP/s" in done.stdout and "fused AdamW" in done.stdout
    assert "off: compile" in done.stdout
