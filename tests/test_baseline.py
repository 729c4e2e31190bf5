"""The glue in Python gives what the kernels' oracles give: it is what they are measured against."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from cuverify.accept_batch import AcceptBatch
from cuverify.baseline import host_accept, host_kv_list, host_trees
from cuverify.draft_batch import DraftBatch
from cuverify.reference import accept, tree_build, verify_lists


def test_trees_in_python() -> None:
    rng = np.random.default_rng(0)
    for depth, k, n in ((4, 3, 17), (2, 2, 12), (15, 16, 65)):
        drafts = DraftBatch.draw(rng, batch=3, depth=depth, k=k, num_tokens=n, kind="ties")
        names = ("logprobs", "token_ids", "root_tokens", "seq_lens")
        found = host_trees(
            *(torch.from_numpy(getattr(drafts, name)) for name in names), num_tokens=n
        )
        wanted = tree_build.tree_build(
            *(getattr(drafts, name) for name in names), num_tokens=n, words=2
        )
        for name in ("tokens", "positions", "next_token", "next_sibling", "retrieve_index"):
            np.testing.assert_array_equal(found[name].numpy(), wanted[name], err_msg=name)
        bits = np.unpackbits(wanted["visible"].view(np.uint8), axis=1, bitorder="little")[:, :n]
        np.testing.assert_array_equal(found["mask"].numpy().reshape(-1, n), bits)


def test_an_index_list_in_python() -> None:
    rng = np.random.default_rng(1)
    table = rng.integers(0, 99, (5, 40)).astype(np.int32)
    lens, rows = np.array([3, 0, 40]), np.array([4, 1, 2])
    bounds, listed = host_kv_list(*map(torch.from_numpy, (table, rows, lens)))
    wanted = verify_lists.verify_lists(
        lens, num_tokens=1, kv_capacity=99, req_to_token=table, req_pool_indices=rows
    )
    np.testing.assert_array_equal(bounds.numpy(), wanted["kv_indptr"])
    np.testing.assert_array_equal(listed.numpy(), wanted["kv_indices"])


def test_a_walk_in_python() -> None:
    rng = np.random.default_rng(2)
    for nodes in (1, 17, 33):
        batch = AcceptBatch.draw(rng, rule="greedy", batch=3, num_tokens=nodes, vocabulary=20)
        batch = replace(batch, retrieve_index=np.arange(3 * nodes).reshape(3, nodes))
        target = accept.argmax(batch.scores)
        tree = (batch.candidates, batch.next_token, batch.next_sibling)
        found = host_accept(*map(torch.from_numpy, (*tree, target)), max_path=batch.max_path)
        wanted = accept.accept_greedy(*tree, target, max_path=batch.max_path)
        for part, name in zip(found, ("predicts", "accept_index", "accept_token_num"), strict=True):
            np.testing.assert_array_equal(part.numpy(), wanted[name], err_msg=name)
