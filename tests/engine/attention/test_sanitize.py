"""The suppression of racecheck's false alarms: narrow, and void unless a planted race is seen."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from config.errors import Exit
from engine.attention import sanitize
from engine.attention.kernels import SM90, attend_sm90, race_controls
from engine.attention.sanitize import Dispatch, Hazard, dispatch_bytes, hazards, judge, starting_lines
from tests.engine.attention.cross_compile import compile_for

# Cut from logs of compute-sanitizer 2025.3.1 on an NVIDIA H200; the numbers in the summaries are of what is left.
CALLS = """========= COMPUTE-SANITIZER
========= Error: Potential RAW hazard detected at __shared__ 0x385c0 in block (2,0,0) :
=========     Write Thread (31,0,0) at _attend_kernel+0x11410 in attend_sm90.py:274
=========     Read Thread (128,0,0) at _attend_kernel+0x400 in attend_sm90.py:274
=========     Current Value : 0
=========
========= Error: Potential RAW hazard detected at __shared__ 0x385cb in block (2,0,0) :
=========     Write Thread (31,0,0) at _attend_kernel+0x18b60 in attend_sm90.py:311
=========     Read Thread (480,0,0) at _attend_kernel+0x400 in attend_sm90.py:274
=========     Current Value : 4
=========
new 26.246591567993164
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
TICKET = """========= Error: Potential RAW hazard detected at __shared__ 0x385e0 in block (4,0,0) :
=========     Write Thread (511,0,0) at _attend_kernel+0x7fe0 in attend_sm90.py:95
=========     Read Thread (96,0,0) at _attend_kernel+0x4f0 in attend_sm90.py:159
=========     Current Value : 4
=========
"""
CONTROLS = """========= COMPUTE-SANITIZER
========= Error: Potential RAW hazard detected at __shared__ 0x430 in block (0,0,0) :
=========     Write Thread (223,0,0) at ordered_word+0x200 in race_controls.py:35
=========     Read Thread (32,0,0) at ordered_word+0x5a0 in race_controls.py:44
=========     Current Value : 42
=========
========= Error: Potential RAW hazard detected at __shared__ 0x436 in block (0,0,0) :
=========     Write Thread (127,0,0) at ordered_word+0x680 in race_controls.py:58
=========     Read Thread (192,0,0) at ordered_word+0x100 in race_controls.py:56
=========     Current Value : 3
=========
========= Error: Potential WAR hazard detected at __shared__ 0x430 in block (0,0,0) :
=========     Read Thread (95,0,0) at planted_race+0x5a0 in race_controls.py:44
=========     Write Thread (192,0,0) at planted_race+0x210 in race_controls.py:35
=========     Current Value : 0, Incoming Value : 42
=========
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""
MEMCHECK = "========= ERROR SUMMARY: 0 errors\n"
DISPATCH = Dispatch("_attend_kernel", 229824, 229836, ("attend_sm90.py:274", "attend_sm90.py:311"))
OF_CONTROLS = [Dispatch(name, 52, 56, ()) for name in ("ordered_word", "planted_race")]


def verdict(calls=CALLS, controls=CONTROLS, memcheck=MEMCHECK, dispatches=(DISPATCH,)):
    return judge(memcheck, (calls, list(dispatches)), (controls, OF_CONTROLS))


def with_one_more(log, hazard):
    number = int(sanitize.SUMMARY.search(log)[1])
    return log.replace("COMPUTE-SANITIZER\n", "COMPUTE-SANITIZER\n" + hazard).replace(
        f"SUMMARY: {number} hazards", f"SUMMARY: {number + 1} hazards"
    )


def test_only_tritons_dispatch_is_put_aside():
    report = verdict()
    assert report["passed"] and report["racecheck_hazards"] == report["of_triton_dispatch"] == 2
    assert report["of_ours"] == [] and report["planted_race_seen"]
    assert report["false_alarms_of_control"] == {"word handed over through an mbarrier": 1, "dispatch bytes": 1}


def test_a_race_on_a_word_of_ours_is_red():
    """The tickets were such a word; whether they raced could not be told from the report, so they are one no more."""
    report = verdict(with_one_more(CALLS, TICKET))
    assert not report["passed"]
    assert report["of_ours"] == [
        {
            "kind": "RAW",
            "kernel": "_attend_kernel",
            "offset": 229856,
            "lines": ("attend_sm90.py:95", "attend_sm90.py:159"),
        }
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x385c0", "0x385bf"),  # the byte before
        ("0x385cb", "0x385cc"),  # the byte behind
        ("attend_sm90.py:311", "attend_sm90.py:95"),  # a store of ours to these bytes
        ("_attend_kernel+0x400 in attend_sm90.py:274", "_attend_kernel+0x400 in attend_sm90.py:164"),
        ("_attend_kernel", "_route_kernel"),
    ],
)
def test_a_hazard_that_differs_in_one_respect_is_red(old, new):
    assert old in CALLS
    report = verdict(CALLS.replace(old, new))
    assert not report["passed"] and report["of_ours"]


def test_without_the_planted_race_the_verdict_is_void():
    blind = CONTROLS[: CONTROLS.index("========= Error: Potential WAR")]
    blind += "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    report = verdict(controls=blind)
    assert not report["planted_race_seen"] and not report["passed"]


def test_what_no_control_reproduces_is_not_put_aside():
    """Launched once, the control was reported on its word alone, and the verdict was green all the same."""
    start = CONTROLS.index("========= Error: Potential RAW hazard detected at __shared__ 0x436")
    word_alone = CONTROLS[:start] + CONTROLS[CONTROLS.index("========= Error: Potential WAR") :]
    word_alone = word_alone.replace("3 hazards", "2 hazards")
    report = verdict(controls=word_alone)
    assert report["false_alarms_of_control"]["dispatch bytes"] == 0 and not report["passed"]
    nothing = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert verdict(calls=nothing, controls=word_alone)["passed"]


@pytest.mark.parametrize("memcheck", ["========= ERROR SUMMARY: 1 error\n", ""])
def test_memchecks_errors_are_red_and_so_is_a_log_without_a_summary(memcheck):
    assert not verdict(memcheck=memcheck)["passed"]


@pytest.mark.parametrize(
    "log",
    [
        CALLS.replace("2 hazards", "3 hazards"),
        CALLS.replace("Read Thread", "Read Lane"),  # another wording, which would be overlooked
        CALLS[: CALLS.index("========= RACECHECK")],
    ],
)
def test_a_log_that_is_not_wholly_understood_is_refused(log):
    with pytest.raises(ValueError, match="hazards that can be read"):
        hazards(log)


def test_a_hazard_is_read():
    assert hazards(CALLS)[1] == Hazard("RAW", "_attend_kernel", 229835, ("attend_sm90.py:311", "attend_sm90.py:274"))


def asm(report):
    return {"ptx": report.ptx, "ttgir": report.ttgir}


def immediate_stores(ptx, values):
    """Bytes of shared memory to which the PTX stores words of small constants, as Triton writes partition numbers."""
    written = set()
    for offset, words in re.findall(r"st\.shared(?:\.v\d)?\.b32\s+\[global_smem\+(\d+)\], \{?([\d, ]+)\}?;", ptx):
        for i, word in enumerate(words.split(",")):
            if all((int(word) >> shift) & 0xFF <= values for shift in (0, 8, 16, 24)):
                written |= set(range(int(offset) + 4 * i, int(offset) + 4 * i + 4))
    return written


@pytest.mark.parametrize("group", [2, 3])
def test_dispatch_bytes_are_those_that_triton_stores_to(group):
    constants = {
        "G": group, "SHIFT": 12, "STAGES": 5, "REGISTERS": SM90.registers, "LSE": False, "BT": 64, "D": 128
    }  # fmt: skip
    report = compile_for(attend_sm90._attend_kernel, 90, constants, num_warps=4)
    first, stop = dispatch_bytes(asm(report))
    assert set(range(first, stop)) == immediate_stores(report.ptx, 7)
    # one a worker warp: the other consumers' and the producer's, in whole warpgroups; behind the tiles of K and V
    assert stop - first == 4 * group and 5 * 2 * 16384 <= first < stop <= report.shared


def test_dispatch_bytes_are_found_as_a_launched_kernel_holds_its_code():
    """Its metadata counts all warps, workers' too: with that number none of these bytes was recognised."""

    report = compile_for(race_controls.ordered_word, 90, {"VALUE": 42}, {"p_out": "*i32"}, num_warps=4)
    variant = SimpleNamespace(asm=asm(report), metadata=SimpleNamespace(num_warps=8))
    launched = SimpleNamespace(fn=race_controls.ordered_word.fn, device_caches={0: ({"key": variant}, {}, None)})
    (found,) = sanitize.compiled_dispatches(launched)
    assert (found.kernel, found.first, found.stop) == ("ordered_word", 52, 56)


def test_dispatch_bytes_of_a_control_are_not_its_word():
    report = compile_for(race_controls.ordered_word, 90, {"VALUE": 42}, {"p_out": "*i32"}, num_warps=4)
    assert dispatch_bytes(asm(report)) == (52, 56)
    assert immediate_stores(report.ptx, 3) == {52, 53, 54, 55}
    assert "[global_smem+48], 42" in report.ptx


def test_ptx_with_another_byte_load_is_refused():
    report = compile_for(race_controls.ordered_word, 90, {"VALUE": 42}, {"p_out": "*i32"}, num_warps=4)
    with pytest.raises(ValueError, match="2 byte loads"):
        dispatch_bytes({**asm(report), "ptx": report.ptx + "ld.shared.b8 \t%r4, [%r6+4];"})


def test_the_lines_that_start_partitions_are_the_kernels_own():
    lines = starting_lines(attend_sm90._attend_kernel.fn)
    text = Path(attend_sm90.__file__).read_text().splitlines()
    named = [text[int(line.rpartition(":")[2]) - 1].strip() for line in lines]
    assert named == ["def _attend_kernel(", "if G == 2:", "gl.warp_specialize(", "gl.warp_specialize("]


def lines_of_dispatch(report):
    """Source lines that PTX gives the stores of partition numbers and the load of one."""
    first, stop = dispatch_bytes(asm(report))
    line, found = 0, []
    for text in report.ptx.splitlines():
        if location := re.match(r"\s*\.loc\s+\d+ (\d+) ", text):
            line = int(location[1])
        stored = re.search(r"st\.shared\S+\s+\[global_smem\+(\d+)\], \{?\d", text)
        if "ld.shared.b8" in text or (stored and first <= int(stored[1]) < stop):
            found.append(line)
    return found


@pytest.mark.parametrize("group", [2, 3])
def test_the_instructions_that_start_partitions_carry_these_lines(group):
    """The last stores carry the line of an ``if`` around the call: it was not among the lines, and all was red."""
    constants = {
        "G": group, "SHIFT": 12, "STAGES": 5, "REGISTERS": SM90.registers, "LSE": True, "BT": 64, "D": 128
    }  # fmt: skip
    found = lines_of_dispatch(compile_for(attend_sm90._attend_kernel, 90, constants, num_warps=4))
    assert len(found) >= 3
    assert {f"attend_sm90.py:{line}" for line in found} <= set(starting_lines(attend_sm90._attend_kernel.fn))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the tools would run")
def test_without_a_gpu_it_refuses_with_the_environments_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sanitize"])
    assert sanitize.main() == Exit.ENVIRONMENT
    assert "a CUDA device of capability 9.0" in capsys.readouterr().err
