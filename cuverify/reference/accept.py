"""Oracle of acceptance: argmax, greedy and sampled walks, one request after another in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

WALKED, BAD_LINK, BAD_INDEX, NO_MASS = range(4)

_LARGEST = np.finfo(np.float32).max


def argmax(logits: NDArray[Any]) -> NDArray[np.int64]:
    """Return the place of each row's largest logit.

    Parameters
    ----------
    logits : ndarray of float32, or of uint16 as bits of bf16, shape (rows, vocabulary)

    Returns
    -------
    ndarray of int64, shape (rows,)
        The lowest place of equal ones, NaN passed over; 0 where nothing is above -inf.
    """
    if logits.dtype == np.uint16:
        logits = (logits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    places: NDArray[np.int64] = np.argmax(np.where(np.isnan(logits), -np.inf, logits), axis=1)
    return places


def accept_greedy(
    candidates: ArrayLike,
    next_token: ArrayLike,
    next_sibling: ArrayLike,
    target: ArrayLike,
    *,
    max_path: int,
    retrieve_index: ArrayLike | None = None,
) -> dict[str, NDArray[np.int32]]:
    """Return what greedy acceptance writes.

    Parameters
    ----------
    candidates, next_token, next_sibling : array_like of int, shape (B, n)
    target : array_like of int, B * n elements
        By `retrieve_index`.
    max_path : int
        Most nodes of a path, the root included.
    retrieve_index : array_like of int, shape (B, n), optional

    Returns
    -------
    dict of str to ndarray
        The fields of `cuverify.ops.accept.AcceptBuffers`.
    """
    tokens, walk = np.asarray(candidates), _Walk(next_token, next_sibling, retrieve_index, max_path)
    choices = np.asarray(target).reshape(-1)
    for request in range(walk.batch):
        node = walk.start(request)
        while node is not None:
            wanted = int(choices[walk.index(node)])
            child = next(
                (
                    child
                    for child in walk.children(node)
                    if child < 0 or tokens[request, child] == wanted
                ),
                None,
            )
            node = walk.go(node, child, wanted)
    return walk.outputs()


def accept_sampled(
    candidates: ArrayLike,
    next_token: ArrayLike,
    next_sibling: ArrayLike,
    uniform: ArrayLike,
    uniform_final: ArrayLike,
    target_probs: ArrayLike,
    *,
    max_path: int,
    draft_probs: NDArray[np.float32] | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    retrieve_index: ArrayLike | None = None,
) -> dict[str, NDArray[Any]]:
    """Return what sampled acceptance writes: see kernels_cu/accept.cu for both rules.

    Parameters
    ----------
    candidates, next_token, next_sibling : array_like of int, shape (B, n)
    uniform : array_like of float32, shape (B, n)
    uniform_final : array_like of float32, shape (B,)
    target_probs : array_like of float32, shape (B, n, vocabulary)
    max_path : int
        Most nodes of a path, the root included.
    draft_probs : ndarray of float32, shape (B, n, vocabulary), optional
        What the buffer holds before; its presence means the published rule.
    threshold_single, threshold_acc : float
    retrieve_index : array_like of int, shape (B, n), optional

    Returns
    -------
    dict of str to ndarray
        The fields of `cuverify.ops.accept.AcceptBuffers`, and ``draft_probs`` where given.
    """
    tokens, walk = np.asarray(candidates), _Walk(next_token, next_sibling, retrieve_index, max_path)
    coins = np.asarray(uniform, np.float32)
    probs = np.asarray(target_probs, np.float32)
    vocab = probs.shape[2]
    probs = probs.reshape(-1, vocab)
    draft = None if draft_probs is None else draft_probs.copy().reshape(-1, vocab)
    single, acc = np.float32(threshold_single), np.float32(max(threshold_acc, 1e-9))
    for request in range(walk.batch):
        node = walk.start(request)
        while node is not None:
            row = walk.index(node)
            total32, total64 = np.float32(0), 0.0
            rejected: list[int] = []
            child = None
            for candidate in walk.children(node):
                child = candidate
                if candidate < 0:
                    break
                token = int(tokens[request, candidate])
                known = 0 <= token < vocab
                p = _clean(probs[row, token]) if known and walk.owner(candidate) == node else 0
                p = np.float32(p)
                if draft is not None:
                    total32 = np.float32(total32 + p)
                    coin = coins[request, node]
                    if p > 0 and (coin < np.float32(total32 / acc) or p >= single):
                        break
                    if known:
                        draft[row, token] = p
                else:
                    token = token if known else -1
                    if token not in rejected:
                        total64 += float(p)
                        if p > 0 and float(coins[request, node]) < total64:
                            break
                        rejected.append(token)
                child = None
            if child is None or child < 0:
                weights = _clean(probs[row])
                if draft is not None and len(walk.path) < max_path:
                    weights = _clean(probs[row] - draft[row])
                weights[[token for token in rejected if token >= 0]] = 0
                last = _draw(weights, np.asarray(uniform_final, np.float32)[request])
                if last is None:
                    last = _draw(_clean(probs[row]), np.asarray(uniform_final, np.float32)[request])
                walk.go(node, child, last or 0)
                if last is None:
                    walk.status[request] = NO_MASS, node
                node = None
            else:
                node = walk.go(node, child, int(tokens[request, child]))
    made: dict[str, NDArray[Any]] = dict(walk.outputs())
    if draft is not None:
        made["draft_probs"] = draft.reshape(np.shape(target_probs))
    return made


def _clean(weights: Any) -> Any:
    """Return weights with 0 for what is no probability."""
    with np.errstate(invalid="ignore"):
        return np.where((weights > 0) & (weights <= _LARGEST), weights, np.float32(0))


def _draw(weights: NDArray[np.float32], uniform: np.float32) -> int | None:
    """Return the first token at which the sum of weights exceeds `uniform` times the whole."""
    possible = np.flatnonzero(weights)
    if not len(possible):
        return None
    sums = np.cumsum(weights.astype(np.float64))
    beyond = np.flatnonzero((sums > float(uniform) * sums[-1]) & (weights > 0))
    return int(beyond[0] if len(beyond) else possible[-1])


class _Walk:
    """The paths of a batch, as they grow."""

    def __init__(
        self,
        next_token: ArrayLike,
        next_sibling: ArrayLike,
        retrieve_index: ArrayLike | None,
        max_path: int,
    ) -> None:
        self.child, self.sibling = np.asarray(next_token), np.asarray(next_sibling)
        self.batch, self.n = self.child.shape
        own = np.arange(self.batch * self.n).reshape(self.batch, self.n)
        self.places = own if retrieve_index is None else np.asarray(retrieve_index)
        self.predicts = np.full(self.batch * self.n, -1, np.int32)
        self.accept_index = np.full((self.batch, max_path), -1, np.int32)
        self.accept_token_num = np.zeros(self.batch, np.int32)
        self.status = np.tile(np.array([WALKED, -1], np.int32), (self.batch, 1))
        self.max_path = max_path
        self.request = 0
        self.path: list[int] = []

    def start(self, request: int) -> int | None:
        """Begin a request's path at its root."""
        self.request, self.path = request, []
        return self._enter(0)

    def index(self, node: int) -> int:
        """Return where outputs of a node stand."""
        return int(self.places[self.request, node])

    def children(self, node: int) -> list[int]:
        """Return a node's children in the order of their links, -2 where one leads astray."""
        if len(self.path) >= self.max_path:
            return []
        return self._listed(node)

    def owner(self, node: int) -> int:
        """Return the lowest node whose list of children has this one."""
        return next(above for above in range(self.n) if node in self._listed(above))

    def go(self, node: int, child: int | None, token: int) -> int | None:
        """Note the token behind a node, and go on to its child."""
        self.predicts[self.index(node)] = token
        if child is None:
            return None
        if child < 0:
            self.status[self.request] = BAD_LINK, node
            return None
        return self._enter(child)

    def outputs(self) -> dict[str, NDArray[np.int32]]:
        """Return what is written."""
        names = ("predicts", "accept_index", "accept_token_num", "status")
        return {name: getattr(self, name) for name in names}

    def _listed(self, node: int) -> list[int]:
        found: list[int] = []
        at = int(self.child[self.request, node])
        while at != -1 or len(found) == self.n:
            if not 0 <= at < self.n or len(found) == self.n:
                return [*found, -2]
            found.append(at)
            at = int(self.sibling[self.request, at])
        return found

    def _enter(self, node: int) -> int | None:
        if self.index(node) // self.n != self.request:
            self.status[self.request] = BAD_INDEX, node
            return None
        self.accept_index[self.request, len(self.path)] = self.index(node)
        self.path.append(node)
        self.accept_token_num[self.request] = len(self.path) - 1
        return node
