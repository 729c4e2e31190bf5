"""A backend and the runner around it: static buffers, hooks in SGLang's order, one step to capture.

What a graph runner does for one replay is here; which replays there are, and what becomes of them,
is `play`'s.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuverify.narrow import Narrow, narrow, widen
from cuverify.sglang.contract import (
    Family,
    ForwardBatch,
    ForwardMode,
    KvPool,
    Layer,
    MakeRunner,
    MhaTokenToKvPool,
    ModelRunner,
    ReqToTokenPool,
    TokenToKvPool,
    VerifyInput,
)
from cuverify.sglang.inputs import PER_TOKEN, GraphInputs
from cuverify.sglang.schedule import (
    Play,
    PlayInputs,
    Shape,
    inputs_of,
    padding_rows,
    stale_fields,
)
from cuverify.static_buffers import fill, write
from cuverify.tolerances import attention_bounds
from cuverify.validators.compare import Bounded, host_array
from cuverify.validators.places import short_path

NAN = float("nan")

_DTYPES: Mapping[Narrow, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8_e4m3": "float8_e4m3fn",
}

_OF_THE_RUNNER = (ModelRunner, ReqToTokenPool, TokenToKvPool, MhaTokenToKvPool, ForwardBatch)

_DEPTH = 3  # of attributes that are looked through for tensors


class Rig:
    """A backend, its pools and the runner's static buffers.

    Parameters
    ----------
    make : callable
        Takes a `ModelRunner` and returns the backend. Called here.
    family : Family
        Which of its hooks to use.
    device : {"cpu", "cuda"}
    shape : Shape

    Attributes
    ----------
    backend : object
    out : tensor, shape (max_tokens, H, latent)
        What `step` writes.
    inputs : GraphInputs
    fill_value : int
        The backend's length of a padded request.
    """

    def __init__(self, make: MakeRunner, family: Family, device: str, shape: Shape) -> None:
        import torch

        self.family, self.device, self.shape = family, device, shape
        width = shape.row[1]

        def buffer(sizes: tuple[int, ...], dtype: Any) -> Any:
            return torch.zeros(sizes, dtype=dtype, device=device)

        dtype, held = (getattr(torch, _DTYPES[kind]) for kind in (shape.element, shape.pool))
        self.req_to_token = buffer(shape.table, torch.int32)
        # codes lie as bytes, as in SGLang: float8 can be neither indexed nor filled everywhere
        stored = torch.uint8 if shape.pool == "fp8_e4m3" else dtype
        self.pools = {name: buffer((shape.num_slots, *shape.row), stored) for name in shape.pools}
        self.q = buffer((shape.max_tokens, shape.heads, width), dtype)
        self.fresh = {name: buffer((shape.max_tokens, *shape.row), dtype) for name in shape.fresh}
        self.out = buffer((shape.max_tokens, shape.heads, shape.columns), dtype)
        self.layer = Layer(0, shape.heads, shape.row[0], width, shape.columns, shape.sm_scale)
        self._req_pool = ReqToTokenPool(self.req_to_token)
        self._kv_pool: KvPool
        if shape.kv_heads is None:
            self._kv_pool = TokenToKvPool(self.pools["kv_buffer"], shape.latent, held)
        else:
            self._kv_pool = MhaTokenToKvPool(**self.pools)
        self._present: ForwardBatch | None = None
        self.backend = make(
            ModelRunner(
                device=device,
                num_attention_heads=shape.heads,
                latent=shape.columns,
                rope=width - shape.columns,
                num_key_value_heads=shape.row[0],
                scaling=shape.sm_scale,
                max_context_len=shape.max_context_len,
                speculative_num_draft_tokens=shape.draft_tokens,
                dtype=dtype,
                kv_cache_dtype=held,
                req_to_token_pool=self._req_pool,
                token_to_kv_pool=self._kv_pool,
            )
        )
        self.backend.init_cuda_graph_state(shape.max_bs, shape.max_tokens)
        self.fill_value = int(self.backend.get_cuda_graph_seq_len_fill_value())
        self.inputs = GraphInputs(family, shape.max_bs, shape.draft_tokens, device, self.fill_value)

    # One pass

    def given(self, play: Play) -> PlayInputs:
        """Return what a play writes."""
        return inputs_of(self.shape, play.requests, play.seed, play.lengths, self.fill_value)

    def eager(self, play: Play) -> None:
        """Run a play's real batch without a graph, on tensors that are as long as it."""
        import torch

        given = self.given(play)
        self._write_pools(play, given)
        fields = self._exact(given.fields)
        mask = torch.from_numpy(given.full_mask()).to(self.device)
        batch = self._batch(play.requests, fields, self._trees(fields, given.links, mask))
        self.backend.init_forward_metadata(batch)
        self._forward(batch)

    def prepare_capture(self, bs: int, play: Play | None = None) -> None:
        """Write a batch and call the hook in front of a capture.

        Parameters
        ----------
        bs : int
            Requests of the graph.
        play : Play, optional
            A full batch. If absent a batch of padding only, on which SGLang captures.
        """
        if play is None:
            self._write_fill(bs)
            batch = self._fill_batch(bs)
        else:
            given = self.given(play)
            self._write_pools(play, given)
            self.inputs.write(given.fields, bs)
            batch = self._graph_batch(bs, given)
        self._present = batch
        if self.family == "split":
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        else:
            self.backend.init_forward_metadata_capture_cuda_graph(
                bs,
                bs * self.shape.draft_tokens,
                batch.req_pool_indices,
                batch.seq_lens,
                None,
                batch.forward_mode,
                batch.spec_info,
            )

    def prepare_replay(self, play: Play) -> None:
        """Write a play's batch and its padding, and call the hook in front of a replay."""
        given, bs = self.given(play), play.captured
        self._write_pools(play, given)
        self._write_padding(play)
        stale = stale_fields(self.shape, play, rows=1 + play.requests)
        self.inputs.write(given.fields, bs, stale)
        batch = self._graph_batch(bs, given)
        self._present = batch
        if self.family == "split":
            self.backend.init_forward_metadata_out_graph(batch)
            return
        self.backend.init_forward_metadata_replay_cuda_graph(
            bs,
            self.inputs.buffers["req_pool_indices"],
            self.inputs.buffers["seq_lens"],
            batch.seq_lens_sum,
            None,
            batch.forward_mode,
            batch.spec_info,
            self.inputs.view("seq_lens_cpu", bs),
        )

    def step(self) -> None:
        """Do what a graph records, for the batch that was prepared last."""
        batch = self._present
        assert batch is not None
        if self.family == "split":
            self.backend.init_forward_metadata_in_graph(batch)
        self._forward(batch)

    def poison(self) -> None:
        """Fill the output with NaN."""
        fill(self.out, NAN)

    def expected(self, play: Play) -> Bounded:
        """Return the right outputs of a play's real requests, and what they may be off by.

        Of the queries and draft rows that are in the buffers now; of the rest as the play has it.
        """
        tokens = play.requests * self.shape.draft_tokens
        q = host_array(self.q[:tokens]).data
        fresh = {name: host_array(rows[:tokens]).data for name, rows in self.fresh.items()}
        given = self.given(play)
        if self.shape.kv_heads is not None:
            return _separate_reference(given, q, fresh, self.device)
        return _reference(given, q, fresh["k"][:, 0], self.device)

    def real_rows(self, play: Play) -> Any:
        """Return the view of the output that a play's real requests get."""
        return self.out[: play.requests * self.shape.draft_tokens]

    def _forward(self, batch: ForwardBatch) -> None:
        tokens = batch.batch_size * self.shape.draft_tokens
        k = self.fresh["k"][:tokens]
        v = self.fresh["v"][:tokens] if "v" in self.fresh else k[..., : self.shape.latent]
        result = self.backend.forward_extend(self.q[:tokens], k, v, self.layer, batch)
        self.out[:tokens].copy_(result.reshape(tokens, self.shape.heads, self.shape.columns))

    # What nobody may write, and where things lie

    def untouchable(self) -> dict[str, Any]:
        """Return copies of everything that a step reads and must leave alone."""
        inputs = {
            f"forward_batch.{name}": tensor.clone() for name, tensor in self.inputs.buffers.items()
        }
        pools = {name: pool.clone() for name, pool in self.pools.items()}
        return {**inputs, "req_to_token": self.req_to_token.clone(), **pools}

    def changed(self, before: Mapping[str, Any], play: Play) -> tuple[str, ...]:
        """Name what is not as it was in `untouchable`, the drafts' slots and slot 0 left out."""
        import torch

        changed = [
            f"forward_batch.{name}"
            for name, tensor in self.inputs.buffers.items()
            if not torch.equal(tensor, before[f"forward_batch.{name}"])
        ]
        if not torch.equal(self.req_to_token, before["req_to_token"]):
            changed.append("req_to_token")
        allowed = {0, *self.given(play).fields["out_cache_loc"].tolist()}
        for name, pool in self.pools.items():
            # as whole numbers: NaN lies where nobody may write
            now, then = (rows.view(torch.uint8) for rows in (pool, before[name]))
            written = (now != then).flatten(1).any(1).nonzero().reshape(-1).tolist()
            wrong = sorted(set(written) - allowed)
            if wrong:
                changed.append(f"{name} slots {wrong[:4]}")
        return tuple(changed)

    def tensors(self) -> dict[str, Any]:
        """Return the backend's own tensors by where they hang, the runner's left out."""
        runners = (*self.inputs.buffers.values(), *self.pools.values(), *self.fresh.values())
        others = (self.req_to_token, self.q, self.out)
        ours = {tensor.untyped_storage().data_ptr() for tensor in (*runners, *others)}
        found: dict[str, Any] = {}
        _collect(self.backend, "", _DEPTH, found, set())
        return {
            path: tensor
            for path, tensor in found.items()
            if tensor.untyped_storage().data_ptr() not in ours
        }

    # Batches

    def _write_pools(self, play: Play, given: PlayInputs) -> None:
        """Write what the model has computed by then: table, cache, queries, the drafts' rows."""
        tokens = play.requests * self.shape.draft_tokens
        write(self.req_to_token, given.req_to_token)
        for name, pool in given.pools.items():
            content = pool
            if play.padding == "numbers":  # what padding wrote to its slot before
                content = pool.copy()
                row = padding_rows(play, 1, pool[0].size, self.shape.pool)
                content[0] = row.reshape(pool[0].shape)
            write(self.pools[name], content)
        write(self.q[:tokens], given.q)
        for name, rows in given.fresh.items():
            write(self.fresh[name][:tokens], rows)

    def _write_padding(self, play: Play) -> None:
        """Write what the model makes of padding into the rows behind the real ones."""
        n, shape = self.shape.draft_tokens, self.shape
        begin, end = play.requests * n, play.captured * n
        kv_heads, width = shape.row
        rows = padding_rows(play, end - begin, shape.heads * width, shape.element)
        rows = rows.reshape(end - begin, shape.heads, width)
        write(self.q[begin:end], rows)
        for fresh in self.fresh.values():
            write(fresh[begin:end], rows[:, :kv_heads])

    def _write_fill(self, bs: int) -> None:
        """Write a batch of padding only, as the runner captures on."""
        for name in (*PER_TOKEN, "req_pool_indices"):
            self.inputs.view(name, bs).zero_()
        for name in ("seq_lens", "seq_lens_cpu"):
            self.inputs.view(name, bs).fill_(self.fill_value)
        for tensor in (self.q, *self.fresh.values(), *self.pools.values()):
            fill(tensor, 0.0)
        fill(self.req_to_token, 0)

    def _graph_batch(self, bs: int, given: PlayInputs) -> ForwardBatch:
        """Return the batch of a graph: views of the static buffers, and trees of real requests."""
        import torch

        owned = self._owned_mask()
        if owned is None:
            mask = torch.from_numpy(given.full_mask()).to(self.device)
        else:
            built = torch.from_numpy(given.query_mask().astype(np.uint8))
            mask = owned.fill_(1)  # what an earlier step may have left behind the real requests
            mask[: built.numel()].copy_(built)
        trees = self._trees(self._exact(given.fields), given.links, mask)
        return self._batch(bs, self._views(bs), trees)

    def _fill_batch(self, bs: int) -> ForwardBatch:
        """Return the batch that a graph is captured on: padding only, everybody sees everybody."""
        import torch

        n = self.shape.draft_tokens
        mask = self._owned_mask()
        if mask is None:
            elements = bs * n * (self.fill_value + n)
            mask = torch.ones(elements, dtype=torch.bool, device=self.device)
        else:
            mask.fill_(1)
        views = self._views(bs)
        return self._batch(bs, views, self._trees(views, np.full((3, bs, n), -1), mask))

    def _owned_mask(self) -> Any:
        """Return the mask buffer that the backend wants filled, None where it has none."""
        owned = getattr(self.backend, "verify_mask", None)
        return owned.buffer if self.family == "split" and owned is not None else None

    def _views(self, bs: int) -> dict[str, Any]:
        return {name: self.inputs.view(name, bs) for name in self.inputs.buffers}

    def _exact(self, fields: Mapping[str, NDArray[np.int64]]) -> dict[str, Any]:
        """Return new tensors as long as the real batch."""
        import torch

        return {
            name: torch.from_numpy(np.array(values, np.int64)).to(
                "cpu" if name == "seq_lens_cpu" else self.device
            )
            for name, values in fields.items()
        }

    def _trees(self, fields: Mapping[str, Any], links: Any, mask: Any) -> VerifyInput:
        import torch

        index, child, sibling = (torch.from_numpy(np.array(link)).to(self.device) for link in links)
        return VerifyInput(
            draft_token=fields["input_ids"],
            custom_mask=mask,
            positions=fields["positions"],
            retrieve_index=index,
            retrieve_next_token=child,
            retrieve_next_sibling=sibling,
            draft_token_num=self.shape.draft_tokens,
            spec_steps=self.shape.draft_tokens - 1,
            topk=self.shape.draft_tokens,
            seq_lens_sum=int(fields["seq_lens_cpu"].sum()),
            seq_lens_cpu=fields["seq_lens_cpu"],
        )

    def _batch(self, bs: int, fields: Mapping[str, Any], trees: VerifyInput) -> ForwardBatch:
        return ForwardBatch(
            batch_size=bs,
            seq_lens_sum=int(fields["seq_lens_cpu"].sum()),
            spec_info=trees,
            req_to_token_pool=self._req_pool,
            token_to_kv_pool=self._kv_pool,
            forward_mode=ForwardMode(),
            **fields,
        )


def place_of_class(make: Any) -> str | None:
    """Return ``file:line`` of a class or function, None where it has no source."""
    try:
        file, (_, line) = inspect.getsourcefile(make), inspect.getsourcelines(make)
    except (OSError, TypeError):
        return None
    return f"{short_path(file)}:{line}" if file else None


def _reference(given: PlayInputs, q: NDArray[Any], k: NDArray[Any], device: str) -> Bounded:
    from cuverify import torch_oracle
    from cuverify.reference.verify_attention import verify_attention

    batch, layout, pool = given.batch, given.batch.layout, given.pools["kv_buffer"][:, 0]
    drafts: dict[str, Any] = {"draft_kv": k}
    if batch.pool_dtype != batch.dtype:
        # the backend may read them back from the pool, where they have been rounded
        slots, pool = layout.out_cache_loc, pool.copy()
        pool[slots] = narrow(widen(k).astype(np.float32), batch.pool_dtype)
        drafts = {"draft_slots": slots}
    arguments: dict[str, Any] = {
        "q": q,
        "pool": pool,
        "latent": batch.latent,
        "sm_scale": batch.sm_scale,
        "qo_indptr": layout.qo_indptr(),
        "kv_indptr": layout.kv_indptr(),
        "kv_indices": layout.kv_indices(),
        "visible": batch.visible(),
        **drafts,
    }
    exact = (
        verify_attention(**arguments)
        if device == "cpu"
        else torch_oracle.verify_attention(**arguments, device=device)
    )
    baseline = torch_oracle.baseline_attention(**arguments, device=device)
    return attention_bounds(exact, baseline, dtype=batch.dtype)["out"]


def _separate_reference(
    given: PlayInputs, q: NDArray[Any], fresh: Mapping[str, NDArray[Any]], device: str
) -> Bounded:
    from cuverify import torch_oracle
    from cuverify.reference.verify_gqa import verify_gqa

    batch, layout = given.batch, given.batch.layout
    arguments: dict[str, Any] = {
        "q": q,
        **given.pools,
        "k_extend": fresh["k"],
        "v_extend": fresh["v"],
        "sm_scale": batch.sm_scale,
        "qo_indptr": layout.qo_indptr(),
        "kv_indptr": layout.kv_indptr(),
        "kv_indices": layout.kv_indices(),
        "visible": batch.visible(),
    }
    attend = functools.partial(torch_oracle.attend, device=device)
    exact = verify_gqa(**arguments) if device == "cpu" else verify_gqa(**arguments, attend=attend)
    baseline = verify_gqa(**arguments, attend=functools.partial(attend, exact=False))
    return attention_bounds(exact, baseline)["out"]


def _collect(owner: Any, path: str, depth: int, found: dict[str, Any], visited: set[int]) -> None:
    import torch

    if isinstance(owner, torch.Tensor):
        found[path] = owner
        return
    if depth < 0 or id(owner) in visited:
        return
    visited.add(id(owner))
    if isinstance(owner, Mapping):
        parts = [(f"{path}[{key!r}]", value) for key, value in owner.items()]
    elif isinstance(owner, (list, tuple)):
        parts = [(f"{path}[{at}]", value) for at, value in enumerate(owner)]
    elif isinstance(owner, _OF_THE_RUNNER):
        return
    elif hasattr(owner, "__dict__") and not isinstance(owner, type):
        parts = [(f"{path}.{name}" if path else name, value) for name, value in vars(owner).items()]
    else:
        return
    for part, value in parts:
        _collect(value, part, depth - 1, found, visited)
