"""Play SGLang's graph runner with a backend, and record what it did.

Per captured size, largest first: the backend's hooks, two warm-ups, a capture; one scratch capture
on another batch before, to see what differs. Then the replays of `schedule`: the runner's buffers
are written and padded by the family's rules, the hooks are called, outputs are poisoned, the graph
runs, and the real requests' rows are compared with the float64 oracle.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import CaseError
from cuverify.sglang.contract import (
    Family,
    ForwardBatch,
    ForwardMode,
    Layer,
    MakeRunner,
    ModelRunner,
    ReqToTokenPool,
    TokenToKvPool,
    VerifyInput,
)
from cuverify.sglang.graphs import Graph, Graphs, frozen_between
from cuverify.sglang.inputs import PER_TOKEN, GraphInputs
from cuverify.sglang.schedule import (
    Play,
    PlayInputs,
    Shape,
    inputs_of,
    padding_rows,
    schedule,
    stale_fields,
)
from cuverify.sglang.seen import ContractSeen, PlaySeen
from cuverify.static_buffers import fill, write
from cuverify.tolerances import attention_bounds
from cuverify.validators.capture import place_of
from cuverify.validators.compare import Bounded, HostArray, compare, differing, host_array
from cuverify.validators.observations import Fault
from cuverify.verify_batch import SM_SCALE

WARMUPS = 2

_NAN = float("nan")
_DEPTH = 3  # of attributes that are looked through for tensors
# a play of this kind is replayed twice, and everything that nobody may write is compared
_THOROUGH_EVERY = 8

Told = Callable[[str, int, int], None]


class _StopError(Exception):
    """A fault was recorded, and nothing after it can be played."""


def play_contract(
    make: MakeRunner,
    family: Family,
    graphs: Graphs,
    shape: Shape,
    *,
    plays: Sequence[Play] | None = None,
    seed: int = 0,
    told: Told | None = None,
) -> ContractSeen:
    """Capture and replay a backend as SGLang's graph runner does.

    Parameters
    ----------
    make : callable
        Takes a `ModelRunner` and returns the backend, new.
    family : Family
        Which of its hooks to use.
    graphs : Graphs
        Where, and what captures.
    shape : Shape
    plays : sequence of Play, optional
        The replays; those of `schedule` if absent.
    seed : int
        Of the schedule.
    told : callable, optional
        Told what is played, how many are done, and of how many.

    Returns
    -------
    ContractSeen
        Unjudged. The first fault of a capture ends the run; one of a replay ends that replay.
    """
    chosen = schedule(shape.captured, seed=seed) if plays is None else list(plays)
    name = getattr(make, "__name__", type(make).__name__)
    seen = ContractSeen(name, family, graphs.device, graphs.name)
    with contextlib.suppress(_StopError):
        run = _Run(make, family, graphs, shape, seen)
        run.eager(chosen)
        run.capture_all()
        for number, play in enumerate(chosen):
            if told is not None:
                told(play.label, number, len(chosen))
            thorough = not play.padded or number % _THOROUGH_EVERY == 0
            seen.plays.append(run.replay(number, play, thorough=thorough))
            fault = seen.plays[-1].fault
            if fault is not None and fault.context_lost:
                break
    return seen


class _Run:
    """A backend and the runner around it."""

    def __init__(
        self, make: MakeRunner, family: Family, graphs: Graphs, shape: Shape, seen: ContractSeen
    ) -> None:
        import torch

        self.family, self.graphs, self.shape, self.seen = family, graphs, shape, seen
        device, width = graphs.device, shape.latent + shape.rope

        def buffer(sizes: tuple[int, ...], dtype: Any) -> Any:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self.req_to_token = buffer(shape.table, torch.int32)
        self.pool = buffer((shape.num_slots, 1, width), torch.bfloat16)
        self.q = buffer((shape.max_tokens, shape.heads, width), torch.bfloat16)
        self.k = buffer((shape.max_tokens, 1, width), torch.bfloat16)
        self.out = buffer((shape.max_tokens, shape.heads, shape.latent), torch.bfloat16)
        self.layer = Layer(0, shape.heads, 1, width, shape.latent, float(SM_SCALE))
        self.req_pool = ReqToTokenPool(self.req_to_token)
        self.kv_pool = TokenToKvPool(self.pool, shape.latent)
        runner = ModelRunner(
            device=device,
            num_attention_heads=shape.heads,
            latent=shape.latent,
            rope=shape.rope,
            scaling=float(SM_SCALE),
            max_context_len=shape.max_context_len,
            speculative_num_draft_tokens=shape.draft_tokens,
            req_to_token_pool=self.req_pool,
            token_to_kv_pool=self.kv_pool,
        )
        self.captured: dict[int, tuple[Graph, dict[str, int]]] = {}
        with self._stage("make", ""):
            self.backend = make(runner)
        with self._stage("init_cuda_graph_state", ""):
            self.backend.init_cuda_graph_state(shape.max_bs, shape.max_tokens)
            self.fill_value = int(self.backend.get_cuda_graph_seq_len_fill_value())
        self.inputs = GraphInputs(
            family, shape.max_bs, shape.draft_tokens, device, self.fill_value
        )
        self._eager_dtypes: dict[str, str] = {}

    # Eager

    def eager(self, plays: Sequence[Play]) -> None:
        """Run a few batches without graphs: the fewest and the most requests, and the longest."""
        full = [play for play in plays if not play.padded]
        longest = [play for play in full if play.lengths == "maximum"]
        for play in [*full[:1], *full[-1:], *longest[:1]]:
            self.seen.eager.append(self._eager(len(self.seen.eager), play))
        self._eager_dtypes = {
            path: str(tensor.dtype) for path, tensor in self._tensors().items()
        }

    def _eager(self, number: int, play: Play) -> PlaySeen:
        given = self._given(play)
        tokens = play.requests * self.shape.draft_tokens
        try:
            self._write_pools(play, given)
            batch = self._eager_batch(play, given)
            fill(self.out, _NAN)
            self.backend.init_forward_metadata(batch)
            self._forward(batch, tokens)
            self.graphs.synchronize()
        except Exception as error:
            return PlaySeen(number, play, fault=self._fault("eager", play.label, error))
        return self._judged(number, play, given)

    def _eager_batch(self, play: Play, given: PlayInputs) -> ForwardBatch:
        """Return a batch of tensors that are as long as it is, in the dtypes of eager runs."""
        import torch

        device = self.graphs.device
        fields = {
            name: torch.from_numpy(np.array(values, np.int64)).to(
                "cpu" if name == "seq_lens_cpu" else device
            )
            for name, values in given.fields.items()
        }
        mask = torch.from_numpy(given.full_mask()).to(device)
        return self._batch(play.requests, fields, given, mask)

    # Capture

    def capture_all(self) -> None:
        """Capture every size, the largest first."""
        for bs in sorted(set(self.shape.captured), reverse=True):
            with self._stage("capture", f"the graph of {bs}"):
                self._capture(bs)
            self.seen.captured.append(bs)

    def _capture(self, bs: int) -> None:
        step = self._step(bs)
        other = Play(bs, bs, seed=10_000 + bs)
        given = self._given(other)
        self._write_pools(other, given)
        self.inputs.write(given.fields, bs)
        self._capture_hooks(bs, self._graph_batch(bs, other, given))
        scratch = self.graphs.capture(step, warmups=1, scratch=True).trace()
        # SGLang captures on padding alone: every length is the fill value
        self._write_fill(bs)
        self._capture_hooks(bs, self._fill_batch(bs))
        graph = self.graphs.capture(self._step(bs), warmups=WARMUPS)
        trace = graph.trace()
        if isinstance(trace, str) or isinstance(scratch, str):
            self.seen.compared_captures = trace if isinstance(trace, str) else str(scratch)
        else:
            self.seen.compared_captures = None
            self.seen.frozen.extend(frozen_between(bs, trace, scratch))
        tensors = self._tensors()
        self.captured[bs] = graph, {path: t.data_ptr() for path, t in tensors.items()}
        self.seen.dtypes = {
            **self.seen.dtypes,
            **{
                path: (self._eager_dtypes[path], str(tensor.dtype))
                for path, tensor in tensors.items()
                if self._eager_dtypes.get(path, str(tensor.dtype)) != str(tensor.dtype)
            },
        }

    def _step(self, bs: int) -> Callable[[], None]:
        tokens = bs * self.shape.draft_tokens
        warmed = getattr(self.backend, "on_after_cuda_graph_warmup", None)

        def step() -> None:
            batch = self._present
            if self.family == "split":
                self.backend.init_forward_metadata_in_graph(batch)
            self._forward(batch, tokens)

        del warmed
        return step

    def _forward(self, batch: ForwardBatch, tokens: int) -> None:
        k = self.k[:tokens]
        result = self.backend.forward_extend(
            self.q[:tokens], k, k[..., : self.shape.latent], self.layer, batch
        )
        self.out[:tokens].copy_(result.reshape(tokens, self.shape.heads, self.shape.latent))

    def _capture_hooks(self, bs: int, batch: ForwardBatch) -> None:
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

    # Replay

    def replay(self, number: int, play: Play, *, thorough: bool) -> PlaySeen:
        """Make one replay; a thorough one twice, with a look at what nobody may write."""
        graph, pointers = self.captured[play.captured]
        given = self._given(play)
        try:
            self._write_pools(play, given)
            self._write_padding(play)
            rows = 1 + len(given.trees)
            self.inputs.write(
                given.fields, play.captured, stale_fields(self.shape, play, rows)
            )
            self._replay_hooks(play, given)
            fill(self.out, _NAN)
            untouched = self._untouchable() if thorough else {}
            self.graphs.synchronize()
            graph.replay()
            seen = self._judged(number, play, given, self._moved(pointers))
            if not thorough:
                return seen
            changed = self._changed(untouched, given)
            first = self._real_rows(play)
            fill(self.out, _NAN)
            self.graphs.synchronize()
            graph.replay()
            repeat = compare("out", self._real_rows(play), first)
        except Exception as error:
            moved = self._moved(pointers)
            fault = self._fault("replay", play.label, error)
            return PlaySeen(number, play, fault=fault, moved=moved)
        return PlaySeen(**{**vars(seen), "repeat": repeat, "changed": changed})

    def _replay_hooks(self, play: Play, given: PlayInputs) -> None:
        batch = self._graph_batch(play.captured, play, given)
        self._present = batch
        if self.family == "split":
            self.backend.init_forward_metadata_out_graph(batch)
            return
        self.backend.init_forward_metadata_replay_cuda_graph(
            play.captured,
            self.inputs.buffers["req_pool_indices"],
            self.inputs.buffers["seq_lens"],
            # of the real requests and the padded ones, as the runner counts them
            int(given.fields["seq_lens"].sum())
            + (play.captured - play.requests) * self.fill_value,
            None,
            batch.forward_mode,
            batch.spec_info,
            self.inputs.view("seq_lens_cpu", play.captured),
        )

    # Batches

    def _given(self, play: Play) -> PlayInputs:
        return inputs_of(self.shape, play.requests, play.seed, play.lengths, self.fill_value)

    def _write_pools(self, play: Play, given: PlayInputs) -> None:
        """Write what the model has computed by then: table, cache, queries, the drafts' rows."""
        tokens = play.requests * self.shape.draft_tokens
        write(self.req_to_token, given.req_to_token)
        pool = given.pool
        if play.padding == "numbers":  # what padding wrote to its slot before
            pool = pool.copy()
            pool[0] = padding_rows(play, 1, pool.shape[1])
        write(self.pool, pool[:, None, :])
        arguments = given.batch
        write(self.q[:tokens], arguments.q())
        write(self.k[:tokens], arguments.draft_kv()[:, None, :])

    def _write_padding(self, play: Play) -> None:
        """Write what the model makes of padding into the rows behind the real ones."""
        n, shape = self.shape.draft_tokens, self.shape
        begin, end = play.requests * n, play.captured * n
        width = shape.latent + shape.rope
        rows = padding_rows(play, end - begin, shape.heads * width)
        write(self.q[begin:end], rows.reshape(end - begin, shape.heads, width))
        write(self.k[begin:end], rows[:, None, :width])

    def _write_fill(self, bs: int) -> None:
        """Write a batch of padding only, as the runner captures on."""
        for name in (*PER_TOKEN, "req_pool_indices"):
            self.inputs.view(name, bs).zero_()
        for name in ("seq_lens", "seq_lens_cpu"):
            self.inputs.view(name, bs).fill_(self.fill_value)
        for tensor in (self.q, self.k, self.pool):
            fill(tensor, 0.0)
        fill(self.req_to_token, 0)

    def _graph_batch(self, bs: int, play: Play, given: PlayInputs) -> ForwardBatch:
        """Return the batch of a graph: views of the runner's static buffers."""
        import torch

        fields = {name: self.inputs.view(name, bs) for name in given.fields}
        owned = getattr(self.backend, "verify_mask", None)
        if self.family == "split" and owned is not None:
            mask = owned.buffer
            built = torch.from_numpy(given.query_mask().astype(np.uint8))
            mask.fill_(1)  # what an earlier step may have left behind the real requests
            mask[: built.numel()].copy_(built)
        else:
            mask = torch.from_numpy(given.full_mask()).to(self.graphs.device)
        return self._batch(bs, fields, given, mask)

    def _fill_batch(self, bs: int) -> ForwardBatch:
        """Return the batch that a graph is captured on: padding only, everybody sees everybody."""
        import torch

        n = self.shape.draft_tokens
        owned = getattr(self.backend, "verify_mask", None)
        if self.family == "split" and owned is not None:
            mask = owned.buffer.fill_(1)
        else:
            elements = bs * n * (self.fill_value + n)
            mask = torch.ones(elements, dtype=torch.bool, device=self.graphs.device)
        fields = {name: self.inputs.view(name, bs) for name in self.inputs.buffers}
        links = np.full((3, bs, n), -1)
        return self._batch(bs, fields, None, mask, links)

    def _batch(
        self,
        bs: int,
        fields: Mapping[str, Any],
        given: PlayInputs | None,
        mask: Any,
        links: NDArray[np.int64] | None = None,
    ) -> ForwardBatch:
        import torch

        chosen = links if given is None else given.links
        assert chosen is not None
        index, child, sibling = (
            torch.from_numpy(np.array(link)).to(self.graphs.device) for link in chosen
        )
        total = int(fields["seq_lens_cpu"].sum())
        spec = VerifyInput(
            draft_token=fields["input_ids"],
            custom_mask=mask,
            positions=fields["positions"],
            retrieve_index=index,
            retrieve_next_token=child,
            retrieve_next_sibling=sibling,
            draft_token_num=self.shape.draft_tokens,
            spec_steps=self.shape.draft_tokens - 1,
            topk=self.shape.draft_tokens,
            seq_lens_sum=total,
            seq_lens_cpu=fields["seq_lens_cpu"],
        )
        return ForwardBatch(
            batch_size=bs,
            seq_lens_sum=total,
            spec_info=spec,
            req_to_token_pool=self.req_pool,
            token_to_kv_pool=self.kv_pool,
            forward_mode=ForwardMode(),
            **fields,
        )

    # What came out

    def _real_rows(self, play: Play) -> HostArray:
        return host_array(self.out[: play.requests * self.shape.draft_tokens])

    def _judged(
        self, number: int, play: Play, given: PlayInputs, moved: tuple[str, ...] = ()
    ) -> PlaySeen:
        actual = self._real_rows(play)
        right = _reference(given, self.graphs.device)
        mismatch = compare("out", actual, right)
        poison = HostArray(np.full_like(actual.data, 0x7FFF), actual.dtype)
        must = differing(poison, right)
        kept = np.isnan(actual.values())
        return PlaySeen(
            number,
            play,
            mismatch=mismatch,
            must_change=int(np.count_nonzero(must)),
            unchanged=int(np.count_nonzero(must & kept)),
            digest=hashlib.sha256(actual.bits().tobytes()).hexdigest()[:16],
            moved=moved,
        )

    def _untouchable(self) -> dict[str, Any]:
        inputs = {
            f"forward_batch.{name}": tensor.clone() for name, tensor in self.inputs.buffers.items()
        }
        return {**inputs, "req_to_token": self.req_to_token.clone(), "kv_buffer": self.pool.clone()}

    def _changed(self, before: Mapping[str, Any], given: PlayInputs) -> tuple[str, ...]:
        import torch

        changed = [
            f"forward_batch.{name}"
            for name, tensor in self.inputs.buffers.items()
            if not torch.equal(tensor, before[f"forward_batch.{name}"])
        ]
        if not torch.equal(self.req_to_token, before["req_to_token"]):
            changed.append("req_to_token")
        bits = (self.pool.view(torch.int16) != before["kv_buffer"].view(torch.int16)).any(-1)
        written = bits.reshape(-1).nonzero().reshape(-1).tolist()
        allowed = {0, *given.fields["out_cache_loc"].tolist()}
        wrong = sorted(set(written) - allowed)
        if wrong:
            changed.append(f"kv_buffer slots {wrong[:4]}")
        return tuple(changed)

    def _tensors(self) -> dict[str, Any]:
        """Return the backend's own tensors by where they hang, the runner's left out."""
        ours = {
            tensor.untyped_storage().data_ptr()
            for tensor in (
                *self.inputs.buffers.values(), self.req_to_token, self.pool, self.q, self.k,
                self.out,
            )
        }  # fmt: skip
        found: dict[str, Any] = {}
        _collect(self.backend, "", _DEPTH, found, set())
        return {
            path: tensor
            for path, tensor in found.items()
            if tensor.untyped_storage().data_ptr() not in ours
        }

    def _moved(self, pointers: Mapping[str, int]) -> tuple[str, ...]:
        now = self._tensors()
        return tuple(
            path
            for path, pointer in pointers.items()
            if path in now and now[path].data_ptr() != pointer
        )

    # Faults

    def _fault(self, stage: str, label: str, error: Exception) -> Fault:
        lost = False
        try:
            self.graphs.synchronize()
        except Exception:
            lost = True
        text = " ".join(str(error).strip().splitlines()[:3])
        return Fault(
            stage, f"{type(error).__name__}: {text}", place_of(error), lost, label
        )

    @contextlib.contextmanager
    def _stage(self, stage: str, label: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.seen.faults.append(self._fault(stage, label, error))
            raise _StopError from error


def _reference(given: PlayInputs, device: str) -> Bounded:
    from cuverify import torch_oracle
    from cuverify.reference.verify_attention import verify_attention

    arguments = given.batch.oracle_arguments()
    exact = (
        verify_attention(**arguments)
        if device == "cpu"
        else torch_oracle.verify_attention(**arguments, device=device)
    )
    baseline = torch_oracle.baseline_attention(**arguments, device=device)
    return attention_bounds(exact, baseline)["out"]


def _collect(
    owner: Any, path: str, depth: int, found: dict[str, Any], visited: set[int]
) -> None:
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
    elif isinstance(owner, (ModelRunner, ReqToTokenPool, TokenToKvPool, ForwardBatch)):
        return
    elif hasattr(owner, "__dict__") and not isinstance(owner, type):
        parts = [
            (f"{path}.{name}" if path else name, value) for name, value in vars(owner).items()
        ]
    else:
        return
    for part, value in parts:
        _collect(value, part, depth - 1, found, visited)


