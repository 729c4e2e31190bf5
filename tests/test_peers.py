"""Other people's kernels: who is found, why others are not, and how they are fed."""

from __future__ import annotations

import ctypes
import lzma
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cuverify import peers
from cuverify.benches.verify_attention import judge_peer
from cuverify.errors import ArgumentError, PeerError
from cuverify.gqa_problem import GqaProblem
from cuverify.gqa_shapes import GqaShape
from cuverify.peers import (
    Missing,
    Peer,
    Prepared,
    fetch,
    flash_attention_3,
    flash_attention_3_gqa,
    flashinfer_mla,
    laid_out,
    sglang_triton,
    sglang_triton_gqa,
)
from cuverify.peers.cascade import seen_counts, seen_first, tail_tables
from cuverify.verify_problem import Problem, new_pool
from cuverify.verify_shapes import Shape


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(Shape((70, 70), 5), new_pool(500, "cpu"), seed=3)


@pytest.fixture
def ragged() -> Problem:
    return Problem(Shape((40, 9), 3), new_pool(200, "cpu"), copies=2)


@pytest.fixture
def no_sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no trace of SGLang's modules behind, whatever was loaded before."""
    before = {name: sys.modules[name] for name in sys.modules if name.split(".")[0] == "sglang"}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


# --- who is here ---------------------------------------------------------------------------------


def test_torch_is_always_here_and_the_others_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, missing = peers.find(["torch*", "FA3*", "FlashInfer*"])
    assert [peer.name for peer in found] == ["torch, bf16 scores", "torch, fp32 scores"]
    assert {peer.name for peer in missing} == {*flash_attention_3.NAMES, *flashinfer_mla.NAMES}
    assert {peer.reason for peer in missing} == {"it runs on sm_90 only"}


def test_peers_are_chosen_by_pattern() -> None:
    found, missing = peers.find(["*fp32*"])
    assert [peer.name for peer in found] == ["torch, fp32 scores"]
    assert missing == []
    with pytest.raises(ArgumentError, match=r"peers='cutlass\*': known are 'torch, bf16 scores'"):
        peers.find(["cutlass*"])


def test_the_folder_is_given_or_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(peers.VARIABLE, raising=False)
    assert peers.folder_of() is None
    monkeypatch.setenv(peers.VARIABLE, str(tmp_path))
    assert peers.folder_of() == tmp_path.resolve()
    with pytest.raises(ArgumentError, match="no such folder"):
        peers.folder_of(tmp_path / "none")


def test_a_library_is_unpacked_where_it_lies(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no folder of peers is named"):
        laid_out.unpacked(None, "x.so")
    with pytest.raises(PeerError, match=r"x\.so\.xz is not in the folder"):
        laid_out.unpacked(tmp_path, "x.so")
    (tmp_path / "x.so.xz").write_bytes(lzma.compress(b"library"))
    assert laid_out.unpacked(tmp_path, "x.so").read_bytes() == b"library"


def test_a_library_that_does_not_load_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(flash_attention_3, "require_hopper", lambda: None)
    (tmp_path / f"{flash_attention_3.LIBRARY}.xz").write_bytes(lzma.compress(b"no library"))
    flash_attention_3.library.cache_clear()
    with pytest.raises(PeerError, match=f"{flash_attention_3.LIBRARY} does not load"):
        flash_attention_3.load(tmp_path)


def test_flashinfer_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flashinfer_mla, "require_hopper", lambda: None)
    monkeypatch.setattr(flashinfer_mla.shutil, "which", lambda name: None)
    flashinfer_mla._library.cache_clear()
    with pytest.raises(PeerError, match="nvcc, which builds it, is not here"):
        flashinfer_mla.load(tmp_path)
    with pytest.raises(PeerError, match="neither installed nor a wheel"):
        flashinfer_mla.headers(tmp_path, tmp_path)
    with zipfile.ZipFile(tmp_path / "flashinfer_python-9.9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flashinfer/data/include/a.cuh", "header")
        wheel.writestr("flashinfer/other.py", "")
    include, *_ = flashinfer_mla.headers(tmp_path, tmp_path / "unpacked")
    assert (include / "a.cuh").read_text() == "header"
    assert not (tmp_path / "unpacked" / "flashinfer" / "other.py").exists()


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 2\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(flashinfer_mla, "require_hopper", lambda: None)
    monkeypatch.setattr(flashinfer_mla.shutil, "which", lambda name: str(compiler))
    monkeypatch.setattr(flashinfer_mla, "headers", lambda *given: [tmp_path])
    flashinfer_mla._library.cache_clear()
    with pytest.raises(PeerError, match="it does not build: no such header"):
        flashinfer_mla.load(tmp_path)


# --- SGLang from the folder ----------------------------------------------------------------------


@pytest.fixture
def sglang_wheel(tmp_path: Path) -> Path:
    """Make a wheel that has SGLang's files by name, each with what it imports."""
    text = """\
from sglang.srt.environ import envs
from sglang.srt.platforms import current_platform
from sglang.srt.platforms.interface import reject_out_of_tree_path
from sglang.srt.utils import get_device_core_count, is_cuda, is_hip, next_power_of_2

assert not envs.ANY.get() and not is_hip() and next_power_of_2(5) == 8 == next_power_of_2(8)


def extend_attention_fwd(*arguments, **keywords):
    return arguments, keywords
"""
    path = tmp_path / "sglang-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in fetch.SGLANG_FILES:
            wheel.writestr(name, text)
        wheel.writestr("sglang/srt/layers/other.py", "raise ImportError")
    return path


@pytest.mark.usefixtures("no_sglang")
def test_sglang_is_found_beside_a_part_of_it_from_elsewhere(
    sglang_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part" / "sglang"
    part.mkdir(parents=True)
    (part / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(part.parent))
    folder = tmp_path / "peers"
    with pytest.raises(PeerError, match=r"No module named 'sglang\.kernels'"):
        sglang_triton.load(folder)
    fetch.lay_out_sglang(sglang_wheel, folder / laid_out.SGLANG_FOLDER)
    (peer,) = sglang_triton.load(folder)
    assert peer.slow
    assert peer.ragged
    assert str(folder) in str(sys.modules["sglang"].__file__)


def test_members_of_wheels_are_packed(sglang_wheel: Path, tmp_path: Path) -> None:
    fetch.pack(sglang_wheel, "sglang/srt/layers/other.py", tmp_path)
    assert lzma.decompress((tmp_path / "other.py.xz").read_bytes()) == b"raise ImportError"


def test_sglang_gets_prefix_mask_and_rows_as_it_wants_them(ragged: Problem) -> None:
    calls: list[tuple[Any, ...]] = []

    def extend(*arguments: Any, **keywords: Any) -> None:
        calls.append((arguments, keywords))

    prepared = sglang_triton.prepare(ragged, sglang_triton.latent_rows(ragged), extend)
    prepared.steps[0]()
    ((arguments, keywords),) = calls
    q, fresh, values, out, pool, pool_values, qo, kv, slots, mask, causal, mask_indptr, most = (
        arguments[:13]
    )
    assert keywords == {"sm_scale": ragged.sm_scale}
    assert causal
    assert q is ragged.q
    assert out is prepared.out
    assert most == 3
    assert torch.equal(fresh[:, 0], ragged.pool[ragged.draft_slots[0]])
    assert torch.equal(values, fresh[..., :512])
    assert pool.data_ptr() == ragged.pool.data_ptr() == pool_values.data_ptr()
    assert qo.tolist() == [0, 3, 6]
    assert kv.tolist() == [0, 40, 49]
    assert torch.equal(slots, ragged.prefix_slots[0].long())
    assert mask_indptr.tolist() == [0, 3 * 43, 3 * (43 + 12)]
    second = mask[3 * 43 :].view(3, 12).bool()
    assert second[:, :9].all()
    assert np.array_equal(second[:, 9:].numpy(), ragged.sees[1])


def test_sglang_gets_keys_and_values_apart() -> None:
    some = GqaProblem(GqaShape.parse("1x30:5@4x3"), slots=90, copies=2, device="cpu")
    calls: list[tuple[Any, ...]] = []
    rows = sglang_triton_gqa.separate_rows(some)
    prepared = sglang_triton.prepare(some, rows, lambda *given, **named: calls.append(given))
    prepared.steps[0]()
    keys, values, _, key_pool, value_pool = calls[0][1:6]
    for fresh, pool, own in ((keys, key_pool, some.pools[0]), (values, value_pool, some.pools[1])):
        assert pool.data_ptr() == own.data_ptr()
        assert torch.equal(fresh, own[some.draft_slots[0]])
        assert fresh.shape == (5, 3, 128)
    mask = calls[0][9].view(5, 35).bool()
    assert mask[:, :30].all()
    assert np.array_equal(mask[:, 30:].numpy(), some.sees[0])


# --- torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Shape((70, 70), 5), Shape((33,), 8), Shape((8,), 1)])
def test_torch_in_bf16_is_right(shape: Shape) -> None:
    some = Problem(shape, new_pool(3 * shape.rows, "cpu"))
    (peer,) = peers.find(["torch, bf16*"])[0]
    prepared = peer.prepare(some)
    assert len(prepared.steps) == some.copies
    assert judge_peer(prepared, some.expected) is None


def test_torch_takes_equal_prefixes_only() -> None:
    (peer,) = peers.find(["torch, bf16*"])[0]
    assert peer.takes(Shape((8, 8), 2))
    assert not peer.takes(Shape((8, 9), 2))


# --- compositions --------------------------------------------------------------------------------


def test_each_token_sees_its_drafts_first(problem: Problem) -> None:
    counts, places = seen_counts(problem.sees), seen_first(problem.sees)
    sees = np.zeros((10, 10), np.bool_)
    sees[:5, :5], sees[5:, 5:] = problem.sees
    for token in range(10):
        assert set(places[token, : counts[token]]) == set(np.flatnonzero(sees[token]))
        assert len(set(places[token])) == 5
    tables, seen = tail_tables(problem)
    assert seen.tolist() == counts.tolist()
    assert torch.equal(tables[2][7].long(), problem.draft_slots[2][torch.from_numpy(places[7])])
    lists = flashinfer_mla.tail_lists(problem)
    first = counts[:7].sum()
    assert torch.equal(lists[2][first : first + counts[7]], tables[2][7, : counts[7]])


class FakeFa3:
    """Both calls of the library, in float64 on the CPU."""

    def __init__(self) -> None:
        self.plans: list[tuple[int, int]] = []

    def get_scheduler_metadata(self, batch: int, *rest: Any) -> Any:
        self.plans.append((batch, rest[-3]))
        return ("plan", batch, rest[-3])

    def fwd(self, q: Any, keys: Any, values: Any, *rest: Any) -> Any:
        q_values, out, bounds = rest[2], rest[3], rest[4]
        used, most, longest, table = rest[8], rest[9], rest[10], rest[11]
        scale = rest[20]
        assert table.shape[1] == longest
        lse = torch.empty((q.shape[1], len(out)), dtype=torch.float32)
        group = q.shape[1] // keys.shape[2]
        for row, count in enumerate(used.tolist()):
            some = slice(int(bounds[row]), int(bounds[row + 1]))
            assert some.stop - some.start <= most
            slots = table[row, :count].long()
            k, v = (rows[slots, 0].double().repeat_interleave(group, 1) for rows in (keys, values))
            scores = torch.einsum("thd,khd->thk", q[some].double(), k) * scale
            if q_values is not None:
                scores += torch.einsum("thd,khd->thk", q_values[some].double(), v) * scale
            out[some] = torch.einsum("thk,khd->thd", torch.softmax(scores, 2), v).bfloat16()
            lse[:, some] = torch.logsumexp(scores, 2).T.float()
        return out, lse


def merged(out: Any, first: Any, second: Any, **_: Any) -> None:
    """Merge as the Triton kernel does."""
    top = torch.maximum(first[1], second[1])
    weights = [torch.exp(part[1] - top) for part in (first, second)]
    if weights[0].shape[0] != len(out):
        weights = [weight.T for weight in weights]
    total = weights[0] + weights[1]
    both = [
        part[0].float() * w[..., None] for part, w in zip((first, second), weights, strict=True)
    ]
    out.copy_((both[0] + both[1]) / total[..., None])


def test_sglangs_sequence_is_the_whole_tree(ragged: Problem) -> None:
    def merge(a: Any, a_lse: Any, b: Any, b_lse: Any, out: Any) -> None:
        assert a_lse.shape == (6, 8)
        merged(out, (a, a_lse), (b, b_lse))

    prepared = flash_attention_3._sequence(ragged, FakeFa3(), merge)
    assert len(prepared.steps) == ragged.copies
    assert judge_peer(prepared, ragged.expected) is None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compositions run on a CPU; the second number of splits is the fastest."""
    times = iter([5.0, 3.0, 4.0])

    def quick(steps: Any, repeats: int, warmups: int) -> Any:
        for step in steps:
            step()
        return SimpleNamespace(us=next(times))

    def forked(main: Callable[[], Any], side: Callable[[], Any], stream: Any) -> Any:
        return main(), side()

    monkeypatch.setattr("cuverify.bench.time_copies", quick)
    monkeypatch.setattr(flash_attention_3, "forked", forked)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    module = SimpleNamespace(merge=merged)
    monkeypatch.setitem(sys.modules, "cuverify.peers.merging", module)  # type: ignore[arg-type]


@pytest.mark.usefixtures("stand_ins")
def test_the_strongest_composition_takes_the_fastest_splits() -> None:
    some, library = Problem(Shape((300,), 3), new_pool(700, "cpu"), copies=2), FakeFa3()
    tensors = flash_attention_3.Tensors.latent(some)
    prepared = flash_attention_3.strongest(some, tensors, library)
    assert prepared.chosen == {"splits": 2}  # of 0, 2 and 4: no split of less than 64 rows
    assert library.plans == [(3, 0), (1, 0), (1, 2), (1, 4), (1, 2)]
    assert judge_peer(prepared, some.expected) is None


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["1x300:5@4x3", "1x300:block16@5x1"])
def test_the_composition_attends_to_separate_keys_and_values(name: str) -> None:
    some, library = GqaProblem(GqaShape.parse(name), slots=800, copies=2, device="cpu"), FakeFa3()
    tensors = flash_attention_3_gqa.separate(some)
    prepared = flash_attention_3.strongest(some, tensors, library)
    assert judge_peer(prepared, some.bounds.out) is None


@pytest.mark.usefixtures("stand_ins")
def test_one_call_attends_to_a_block_and_its_context() -> None:
    shape = GqaShape((300, 200), 16, "block", heads=8, kv_heads=2)
    some, library = GqaProblem(shape, slots=1200, copies=2, device="cpu"), FakeFa3()
    prepared = flash_attention_3_gqa.whole(some, library)
    assert prepared.chosen == {"splits": 2}
    assert len(prepared.steps) == 2
    assert judge_peer(prepared, some.bounds.out) is None
    some.pools[1, some.draft_slots[1][20]] += 4
    assert "of its length, allowed" in str(judge_peer(prepared, some.bounds.out))


def test_one_call_is_for_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_3_gqa, "library", lambda folder: FakeFa3())
    _, whole = flash_attention_3_gqa.load(None)
    takes = [
        name for name in ("1x4k:16@4x2", "1x4k:block16@4x2") if whole.takes(GqaShape.parse(name))
    ]
    assert takes == ["1x4k:block16@4x2"]


def test_splits_are_neither_tiny_nor_a_mountain() -> None:
    fit = flash_attention_3.splits_fit
    assert [splits for splits in (0, 16, 32) if fit(Shape((1024,), 8), splits)] == [0, 16]
    assert not fit(Shape((262_144,) * 64, 64), 128)


def test_flashinfers_calls_get_addresses_and_lists(ragged: Problem) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []

    class Library:
        def mla_plan(self, *arguments: Any) -> int:
            calls.append(("plan", arguments))
            return 0

        def mla_run(self, *arguments: Any) -> int:
            calls.append(("run", arguments))
            return 700

    plan = flashinfer_mla._Plan.__new__(flashinfer_mla._Plan)
    plan.library, plan.heads = Library(), 8
    plan.floats = plan.numbers = torch.zeros(4)
    plan.words = (ctypes.c_int64 * 18)()
    out, lse = ragged.new_output(), torch.zeros((6, 8))
    if not torch.cuda.is_available():
        flashinfer_stream = SimpleNamespace(cuda_stream=0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", lambda: flashinfer_stream)
            with pytest.raises(RuntimeError, match="ended with CUDA error 700"):
                plan.attend(ragged, ragged.prefix_slots[1], out, lse)
        ((name, arguments),) = calls
        assert name == "run"
        addresses = [argument.value for argument in arguments[3:8]]
        assert addresses == [
            tensor.data_ptr()
            for tensor in (ragged.q, ragged.pool, ragged.prefix_slots[1], out, lse)
        ]


# --- the gate ------------------------------------------------------------------------------------


def test_a_wrong_peer_is_named_with_its_worst_row(problem: Problem) -> None:
    out = problem.new_output()

    def prepared(write: Callable[[], None]) -> Prepared:
        return Prepared([write], out)

    def right() -> None:
        out.copy_(problem.expected)

    def wrong() -> None:
        right()
        out[7, 3] *= 1.1

    assert judge_peer(prepared(right), problem.expected) is None
    found = judge_peer(prepared(wrong), problem.expected)
    assert found is not None
    assert found.startswith("out[7, 3] is off by 0.099")
    assert "so are 1 of 80 rows" in found
    left = judge_peer(prepared(lambda: None), problem.expected)
    assert left is not None
    assert "off by nan" in left


def test_the_last_copy_is_judged_too(problem: Problem) -> None:
    out = problem.new_output()
    steps = [lambda: out.copy_(problem.expected), lambda: out.zero_()]
    found = judge_peer(Prepared(steps, out), problem.expected)  # type: ignore[arg-type]
    assert found is not None
    assert "off by 1 of" in found


def test_missing_and_found_are_plain_data() -> None:
    assert Missing("x", "why") == Missing("x", "why")
    assert Peer("x", lambda problem: Prepared([], None), ragged=True).takes(Shape((8, 9), 2))
