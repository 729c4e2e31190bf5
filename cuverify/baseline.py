"""The glue of a decode step as Python loops have it: the version to read and to measure against.

A heap, numpy masks, ``.item()`` and copies from and to the device; every call waits for the GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuverify.reference.tree_build import best_first_tree
from cuverify.tree import DraftTree


def host_trees(
    logprobs: Any, token_ids: Any, root_tokens: Any, seq_lens: Any, *, num_tokens: int
) -> dict[str, Any]:
    """Build a batch's trees on the host and copy them to the device.

    Parameters
    ----------
    logprobs, token_ids : torch.Tensor, shape (B, depth, k)
        Finite and descending; tokens of a depth distinct or not.
    root_tokens, seq_lens : torch.Tensor, shape (B,)
    num_tokens : int
        Nodes of a request, the root included.

    Returns
    -------
    dict of str to torch.Tensor
        ``tokens``, ``positions``, ``retrieve_index``, ``next_token``, ``next_sibling`` (int64,
        (B, n)) and ``mask`` (bool, (B, n, n)), on the inputs' device.
    """
    import torch

    batch, depth, k = logprobs.shape
    made: dict[str, list[Any]] = {name: [] for name in ("tokens", "positions", "next_token")}
    made |= {"next_sibling": [], "mask": []}
    ranks = np.broadcast_to(np.arange(k), (depth, k))
    for request in range(batch):
        table = logprobs[request].cpu().numpy()
        ids = token_ids[request].cpu().numpy()
        grown = best_first_tree(table, ranks, num_tokens - 1)
        tree = DraftTree.from_parents(grown.parents)
        size = tree.num_tokens
        tokens = np.full(num_tokens, root_tokens[request].item(), np.int64)
        tokens[1:size] = ids[grown.depths[1:] - 1, grown.ranks[1:]]
        positions = np.full(num_tokens, seq_lens[request].item(), np.int64)
        positions[:size] += grown.depths
        mask = np.eye(num_tokens, dtype=np.bool_)
        mask[:, 0] = True
        mask[:size, :size] = tree.mask()
        made["tokens"].append(tokens)
        made["positions"].append(positions)
        made["mask"].append(mask)
        for name, link in zip(("next_token", "next_sibling"), tree.links(), strict=True):
            made[name].append(np.concatenate([link, np.full(num_tokens - size, -1)]))
    device = logprobs.device
    found = {name: torch.from_numpy(np.stack(rows)).to(device) for name, rows in made.items()}
    found["retrieve_index"] = torch.arange(batch * num_tokens, device=device).view(batch, -1)
    return found


def host_kv_list(req_to_token: Any, req_pool_indices: Any, seq_lens: Any) -> tuple[Any, Any]:
    """Build the index list of a layer as eager code does, one request after another.

    Returns
    -------
    kv_indptr, kv_indices : torch.Tensor of int32
        On the inputs' device.
    """
    import torch

    parts, bounds = [], [0]
    for request in range(len(seq_lens)):
        length = seq_lens[request].item()
        row = req_pool_indices[request].item()
        parts.append(req_to_token[row, :length])
        bounds.append(bounds[-1] + length)
    indptr = torch.tensor(bounds, dtype=torch.int32, device=req_to_token.device)
    return indptr, torch.cat(parts)


def host_accept(
    tokens: Any, next_token: Any, next_sibling: Any, target: Any, *, max_path: int
) -> tuple[Any, Any, Any]:
    """Walk each tree on the host, as greedy acceptance means it.

    Parameters
    ----------
    tokens, next_token, next_sibling : torch.Tensor of int64, shape (B, n)
    target : torch.Tensor of int64, shape (B * n,)
        The target's choice behind each node.
    max_path : int
        Most nodes of a path, the root included.

    Returns
    -------
    predicts, accept_index, accept_token_num : torch.Tensor of int32
        Shapes (B * n,), (B, max_path) and (B,); -1 where nothing is.
    """
    import torch

    batch, n = tokens.shape
    predicts = np.full(batch * n, -1, np.int32)
    index = np.full((batch, max_path), -1, np.int32)
    number = np.zeros(batch, np.int32)
    for request in range(batch):
        node, path = 0, [0]
        while len(path) < max_path:
            wanted = target[request * n + node].item()
            child = next_token[request, node].item()
            while child >= 0 and tokens[request, child].item() != wanted:
                child = next_sibling[request, child].item()
            if child < 0:
                break
            predicts[request * n + node] = wanted
            node = child
            path.append(child)
        predicts[request * n + node] = target[request * n + node].item()
        index[request, : len(path)] = np.array(path) + request * n
        number[request] = len(path) - 1
    device = tokens.device
    return tuple(torch.from_numpy(made).to(device) for made in (predicts, index, number))  # type: ignore[return-value]
