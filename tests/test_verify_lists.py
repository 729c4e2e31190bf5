"""The lists in SGLang's forms against their oracle and against trees, in both lanes."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cuverify
from cuverify.buffers import read
from cuverify.cases import Target
from cuverify.cases.verify_lists import Drafts, ListsBatch, VerifyListsStep
from cuverify.errors import ArgumentError
from cuverify.ops.verify_lists import ListCode, VerifyLists, VerifyWords, list_kernels
from cuverify.reference import verify_lists as oracle
from cuverify.strategies import examples
from cuverify.tree import DraftTree, MaskMode

Schedule = Literal["ascending", "descending", "random"]
gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])
MODES: tuple[MaskMode, ...] = ("full", "query_only", "bit_packed")
DRAFTS: tuple[Drafts, ...] = ("none", "given", "table")


def check(step: VerifyListsStep, batch: ListsBatch) -> None:
    step.refill(batch)
    step.poison()
    step()
    for name, wanted in step.expected().items():
        found = read(step.outputs[name])
        found = found.view(np.uint64) if wanted.dtype == np.uint64 else found
        np.testing.assert_array_equal(found, wanted, err_msg=f"{name} of {batch}")


def check_lists(
    seed: int, xp: Target, *, batch: int, longest: int, n: int, mode: MaskMode, drafts: Drafts
) -> None:
    rng = np.random.default_rng(seed)
    drawn = ListsBatch.draw(
        rng, batch=batch, num_tokens=n, longest=longest, mode=mode, drafts=drafts,
        graph=seed % 2 == 0,
    )  # fmt: skip
    check(VerifyListsStep(drawn, xp), drawn)
    faulty = drawn.spoiled(rng)
    check(VerifyListsStep(faulty, xp), faulty)


lists = {
    "seed": st.integers(0, 2**32 - 1),
    "batch": st.integers(1, 6),
    "longest": st.sampled_from([0, 1, 17, 64, 200]),
    "n": st.sampled_from([1, 2, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 129]),
    "mode": st.sampled_from(MODES),
    "drafts": st.sampled_from(DRAFTS),
}


@examples(60)
@given(**lists)
@example(seed=1, batch=300, longest=20, n=9, mode="full", drafts="given")
@example(seed=2, batch=2, longest=9000, n=3, mode="query_only", drafts="table")
def test_drawn_lists(n: int, mode: MaskMode, **how: Any) -> None:
    check_lists(xp="numpy", n=min(n, 32) if mode == "bit_packed" else n, mode=mode, **how)


@examples(10)
@given(**lists, schedule=st.sampled_from(["ascending", "descending", "random"]))
def test_drawn_lists_under_the_checkers(
    n: int, mode: MaskMode, schedule: Schedule, **how: Any
) -> None:
    with cuverify.checked(schedule=schedule, seed=how["seed"]):
        check_lists(xp="numpy", n=min(n, 32) if mode == "bit_packed" else n, mode=mode, **how)


@gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_lists_on_a_gpu(mode: MaskMode, drafts: Drafts) -> None:
    for seed in (2, 3):
        check_lists(seed, "torch-cuda", batch=50, longest=700, n=17, mode=mode, drafts=drafts)
    check_lists(4, "torch-cuda", batch=8, longest=131_072, n=3, mode="query_only", drafts=drafts)


def test_words_of_a_mask_are_the_tree_s() -> None:
    rng = np.random.default_rng(0)
    for mode in MODES:
        trees = [DraftTree.random(20, rng) for _ in range(3)]
        lens = [4, 0, 9]
        mask = np.concatenate(
            [t.sglang_mask(mode, s).reshape(-1) for t, s in zip(trees, lens, strict=True)]
        )
        bounds = np.concatenate([[0], np.cumsum([20 * (20 + length) for length in lens])])
        found = oracle.verify_words(
            mask, lens, num_tokens=20, words=2, mode=mode, mask_indptr=bounds
        )
        wanted = np.concatenate([tree.visibility(2) for tree in trees])
        np.testing.assert_array_equal(found, wanted)


class Lists:
    """The bounds of one step, with any lengths and no table."""

    def __init__(self, lens: Any, n: int, xp: Target, *, bound: Any = np.int32) -> None:
        self.made = {
            "kv_indptr": np.full(len(lens) + 1, 9, bound),
            "qo_indptr": np.full(len(lens) + 1, 9, np.int64),
            "mask_indptr": np.full(len(lens) + 1, 9, np.int64),
            "status": np.full(4, 9, np.int32),
        }
        given = np.asarray(lens, np.int64)
        if xp != "numpy":
            import torch

            self.made = {k: torch.from_numpy(v).cuda() for k, v in self.made.items()}
            given = torch.from_numpy(given).cuda()
        self.op = VerifyLists(given, num_tokens=n, **self.made)
        self.op()

    def __getitem__(self, name: str) -> list[int]:
        values: list[int] = read(self.made[name]).tolist()
        return values


@both_lanes
def test_masks_of_more_than_two_billion_bytes_have_bounds(xp: Target) -> None:
    found = Lists([200_000] * 300, 64, xp)
    assert found["kv_indptr"][-1] == 60_000_000
    assert found["mask_indptr"][-1] == 300 * 64 * 200_064
    assert found["qo_indptr"][-1] == 300 * 64


@both_lanes
def test_bounds_that_do_not_fit_are_flagged(xp: Target) -> None:
    lens = [2**30, 2**30, 5]
    found = Lists(lens, 2, xp)
    assert found["status"] == [ListCode.BAD_CAPACITY, 1, 2**30, 0]
    assert found["kv_indptr"] == found["mask_indptr"] == [0] * 4
    with pytest.raises(ArgumentError, match=r"seq_lens\[1\]=1073741824.*BAD_CAPACITY"):
        found.op.read_status()
    assert Lists(lens, 2, xp, bound=np.int64)["kv_indptr"] == [0, 2**30, 2**31, 2**31 + 5]


@pytest.mark.parametrize("lens", [[2**60, 3], [2**63 - 1, 3], [2**31, 3], [2**62] * 4])
def test_lengths_that_wrap_around_are_flagged(lens: list[int]) -> None:
    found = Lists(lens, 16, "numpy", bound=np.int64)
    assert found["status"][:2] == [ListCode.BAD_LENGTH, 0]
    assert found["kv_indptr"] == found["mask_indptr"] == [0] * (len(lens) + 1)
    # whatever the bounds say: n (2**60 + n) bytes are 256 in 64 bits
    mask, given = np.ones(512, np.uint8), np.array(lens)
    for first in (0, 2**63 - 256):
        bounds = np.array([first, *[first + 256 - 2**64 * (first > 0)] * len(lens)])
        visible = np.zeros((16 * len(lens), 1), np.uint64)
        with cuverify.checked():
            VerifyWords(mask, given, visible, mode="full", mask_indptr=bounds)()
        assert visible[:16, 0].tolist() == [1 << node for node in range(16)]
        wanted = oracle.verify_words(
            mask, given, num_tokens=16, words=1, mode="full", mask_indptr=bounds
        )
        np.testing.assert_array_equal(visible, wanted)


def test_bounds_at_the_end_of_64_bits_are_no_place_in_a_mask() -> None:
    mask, lens, visible = np.ones(512, np.uint8), np.zeros(1, int), np.zeros((16, 1), np.uint64)
    bounds = np.array([2**63 - 1, -(2**63) + 255])  # 256 apart, modulo 2**64
    with cuverify.checked():
        VerifyWords(mask, lens, visible, mode="full", mask_indptr=bounds)()
    assert visible[:, 0].tolist() == [1 << node for node in range(16)]


def test_the_kernels_need_no_local_memory() -> None:
    for arch in ("sm_80", "sm_90", "sm_120"):
        for name, kernel in list_kernels().items():
            resources = kernel.compile(arch).resources[name]
            assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0), resources


def test_misuse_names_the_argument() -> None:
    def call(**other: Any) -> None:
        right: dict[str, Any] = {
            "seq_lens": np.zeros(2, np.int32),
            "num_tokens": 3,
            "kv_indptr": np.zeros(3, np.int32),
            "qo_indptr": np.zeros(3, np.int32),
            "mask_indptr": np.zeros(3, np.int64),
            "status": np.zeros(4, np.int32),
        }
        VerifyLists(**right | other)

    table = {
        "req_to_token": np.zeros((2, 9), np.int32),
        "req_pool_indices": np.zeros(2, np.int32),
        "kv_indices": np.zeros(9, np.int32),
    }
    call()
    call(**table)
    for other, says in (
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"seq_lens": np.zeros((2, 1), np.int32)}, "seq_lens="),
        ({"seq_lens": np.zeros(2, np.float32)}, "seq_lens=.*int32 or int64"),
        ({"mask_indptr": np.zeros(3, np.int32)}, "mask_indptr=.*int32"),
        ({"kv_indptr": np.zeros(4, np.int32)}, "kv_indptr="),
        ({"kv_indices": np.zeros(9, np.int32)}, "req_to_token=None.*goes with kv_indices"),
        ({"drafts": "all"}, "drafts='all'"),
        ({"drafts": ["none"]}, r"drafts=\['none'\]"),
        ({"seq_lens": None}, "seq_lens=None"),
        ({"kv_indptr": None}, "kv_indptr=None"),
        (table | {"kv_indices": np.array(3)}, "kv_indices=.*one dimension"),
        (table | {"drafts": "given"}, "drafts='given'.*out_cache_loc"),
        ({"drafts": "table"}, "drafts='table'.*kv_indices"),
        (table | {"req_to_token": np.zeros(9, np.int32)}, "req_to_token=.*rows, width"),
    ):
        with pytest.raises(cuverify.errors.CuverifyError, match=f"(?s){says}"):
            call(**other)
    words, lens = np.zeros((6, 1), np.uint64), np.zeros(2, np.int32)
    for made, how, says in (
        (words[:5], {"mode": "query_only"}, "visible=.*2 requests"),
        (np.zeros((130, 1), np.uint64), {"mode": "query_only"}, "visible=.*1 words hold 64 of 65"),
        (words, {"mode": "full"}, "mask_indptr=None.*full"),
        (words, {"mode": "half"}, "mode='half'"),
    ):
        with pytest.raises(ArgumentError, match=f"(?s){says}"):
            VerifyWords(np.zeros(99, np.uint8), lens, made, **how)
