"""The engine behind `cuverify check`: every case compiled, run under checkers, captured, replayed.

Three stages a case. *Compile*: every kernel for every architecture, no GPU needed. *Host lane*:
every batch under the checkers with three schedules and once in the plain build, compared with the
oracle; a few once more under the compiler's sanitizers; several cases run at a time, each in a
child process. *Device*: every batch eagerly and in a replayed graph, in a child process, where
there is a GPU. What could not be inspected is a line of coverage, never silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cuverify import cases as registry
from cuverify.cases import CheckCase
from cuverify.check_findings import MergedFindings, case_fault, of_case
from cuverify.check_shares import HostShares
from cuverify.errors import ArgumentError, DeviceError, ToolchainError
from cuverify.host.options import SCHEDULES
from cuverify.report import Coverage, Finding, Report, Table

if TYPE_CHECKING:
    from cuverify.resources import Compilations
    from cuverify.sources import KernelSource

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many
Device = Literal["auto", "cpu", "cuda"]

SECOND_OPINIONS = 2  # batches of a case: each launch is a program of its own
SILENCE_S = 120.0  # a first run compiles; after that a batch takes milliseconds

_RESOURCE_COLUMNS = (
    "case",
    "kernel",
    "values",
    "arch",
    "registers",
    "spill B",
    "static shared B",
    "dynamic shared B",
    "threads",
)
_CASE_COLUMNS = ("case", "kernels", "host batches", "host runs", "GPU batches", "GPU replays")


def run_checks(
    cases: Sequence[str | CheckCase] | None = None,
    *,
    architectures: Sequence[str] | None = None,
    seed: int = 0,
    examples: int | None = None,
    device: Device = "auto",
    progress: Progress | None = None,
    silence_s: float = SILENCE_S,
    second_opinions: int = SECOND_OPINIONS,
) -> Report:
    """Check cases as far as this machine can.

    Parameters
    ----------
    cases : sequence of str or CheckCase, optional
        References as `cuverify.cases.load` takes them, or objects. All of the package's without
        any. The GPU stage needs references: a child process must find the case again.
    architectures : sequence of str, optional
        Those to compile for; all supported ones by default, and none with an empty sequence.
    seed : int
        Draws batches and random schedules.
    examples : int, optional
        Batches to draw; the case's own number by default.
    device : {"auto", "cpu", "cuda"}
        ``"auto"`` uses a GPU where there is one, ``"cuda"`` insists on one.
    progress : callable, optional
        Told what is being done, how many of it are done, and of how many.
    silence_s : float
        Seconds after which a GPU run that says nothing counts as hanging.
    second_opinions : int
        Batches of a case that also run under ASan and UBSan, where the compiler has them.

    Returns
    -------
    Report
        Findings of all cases; tables of resources and of what was run; coverage.

    Raises
    ------
    CaseError
        A reference names no case.
    ToolchainError
        NVRTC, CUDA headers or a C++ compiler is missing.
    ArgumentError
        An unknown architecture or device.
    DeviceError
        ``device="cuda"`` and there is none.

    Notes
    -----
    KeyboardInterrupt ends the child process and passes through.

    Examples
    --------
    >>> report = run_checks(["relocate"], architectures=["sm_90"])  # doctest: +SKIP
    >>> report.ok  # doctest: +SKIP
    True
    """
    from cuverify.compile import ARCHITECTURES
    from cuverify.resources import Compilations

    if device not in ("auto", "cpu", "cuda"):
        raise ArgumentError("device", device, "use 'auto', 'cpu' or 'cuda'")
    wanted = ARCHITECTURES if architectures is None else tuple(architectures)
    for arch in wanted:
        if arch not in ARCHITECTURES:
            raise ArgumentError("architectures", arch, f"known are {', '.join(ARCHITECTURES)}")
    subjects = [_subject(entry) for entry in (cases or registry.names())]
    no_gpu = _why_no_gpu(device)
    if no_gpu is not None and device == "cuda":
        raise DeviceError(f"device='cuda': {no_gpu}; device='auto' checks without one")
    with (
        Compilations() as compilations,
        HostShares(seed=seed, examples=examples, second_opinions=second_opinions) as shares,
    ):
        run = _Run(
            wanted, seed, examples, silence_s, progress or _say_nothing, second_opinions,
            compilations, shares,
        )  # fmt: skip
        # all texts compile in the background while cases run on the host lane
        for subject in subjects:
            run.begin(subject)
        if len(subjects) > 1:
            run.share_out(subjects)
        for subject in subjects:
            run.compile(subject)
            run.on_host(subject)
            if no_gpu is None:
                run.on_device(subject)
    return run.report(subjects, no_gpu)


@dataclass
class _Subject:
    """A case, and what was done with it."""

    case: CheckCase
    reference: str | None
    kernels: int = 0
    sources: tuple[KernelSource, ...] = ()
    host_batches: int = 0
    host_runs: int = 0
    gpu_batches: int = 0
    gpu_replays: int = 0
    dynamic_shared: Mapping[str, int] = field(default_factory=dict)  # by kernel
    # (-D values, one row of the compiler's survey by its columns)
    resources: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.case.name


def _subject(entry: str | CheckCase) -> _Subject:
    if isinstance(entry, str):
        return _Subject(registry.load(entry), entry)
    name = entry.name
    known = name in registry.names() and registry.load(name) is entry
    return _Subject(entry, name if known else None)


def _why_no_gpu(device: Device) -> str | None:
    """Return why nothing can run on a GPU, None when it can. Makes no CUDA context."""
    if device == "cpu":
        return "not asked for (device='cpu')"
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None


def _say_nothing(what: str, done: int, total: int) -> None:
    pass


@dataclass
class _Run:
    """One call of `run_checks`: the stages, and what they brought."""

    architectures: tuple[str, ...]
    seed: int
    examples: int | None
    silence_s: float
    progress: Progress
    second_opinions: int
    compilations: Compilations
    shares: HostShares
    shared: set[str] = field(default_factory=set)  # references of cases that run in children
    findings: MergedFindings = field(default_factory=MergedFindings)
    gaps: dict[tuple[str, str], int] = field(default_factory=dict)  # (subject, reason) -> times
    compiled: dict[str, int] = field(default_factory=dict)  # kernels by architecture
    opinions: int = 0  # batches that ran under the sanitizers
    no_opinions: set[str] = field(default_factory=set)  # why others did not
    device: Mapping[str, str] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)  # of the captures

    def begin(self, subject: _Subject) -> None:
        """Find out what the case's kernels are, and begin to compile them."""
        from cuverify.resources import wanted

        try:
            kernels = list(subject.case.kernels())
        except ToolchainError:
            raise
        except Exception as error:
            self.findings.add(case_fault(subject.name, "kernels()", error), subject.name)
            return
        subject.kernels = len(kernels)
        # The host lane will not say what these need.
        limited = {
            kernel.name: kernel.declared_shared()
            for kernel in kernels
            if kernel.contract.architectures
        }
        subject.dynamic_shared = {name: size for name, size in limited.items() if size is not None}
        sources = {kernel.source.digest(): kernel.source for kernel in kernels}
        subject.sources = tuple(sources.values())
        for source, arch in wanted(subject.sources, self.architectures):
            self.compilations.begin(source, arch)

    def compile(self, subject: _Subject) -> None:
        """Add what the compiler says; an error is a finding with its file and line."""
        from cuverify.resources import COLUMNS, survey

        if not self.architectures:
            return
        sources = subject.sources
        for number, source in enumerate(sources):

            def told(what: str, done: int, total: int, number: int = number) -> None:
                self.progress(
                    f"{subject.name}: compile {what}", number * total + done, len(sources) * total
                )

            report = survey(
                [source], self.architectures, progress=told, compilations=self.compilations
            )
            for finding in report.findings:
                kind = (subject.name, finding.where, finding.message)
                self.findings.add(of_case(subject.name, finding), *kind)
            for row in report.tables[0].rows:
                entry = dict(zip(COLUMNS, row, strict=True))
                subject.resources.append((source.values, entry))
                arch = str(entry["arch"])
                self.compiled[arch] = self.compiled.get(arch, 0) + 1
            self._add_spills(subject, source.name, report.tables[0].rows)

    def _add_spills(self, subject: _Subject, source: str, rows: Sequence[Sequence[Any]]) -> None:
        from cuverify.resources import COLUMNS

        spills: dict[str, dict[str, int]] = {}
        for row in rows:
            entry = dict(zip(COLUMNS, row, strict=True))
            if entry["spill B"]:
                spills.setdefault(entry["kernel"], {})[entry["arch"]] = entry["spill B"]
        for kernel, by_arch in spills.items():
            worst = max(by_arch, key=lambda arch: by_arch[arch])
            finding = Finding(
                "compile-spill",
                "warning",
                f"{subject.name}: `{kernel}` spills registers to memory, {by_arch[worst]} bytes "
                f"a thread on {worst}",
                source,
                {"case": subject.name, "spill_bytes": by_arch},
                "Use smaller tiles, fewer values alive at once, or a larger register budget in "
                "__launch_bounds__.",
            )
            self.findings.add(finding, subject.name, kernel, source)

    def share_out(self, subjects: Sequence[_Subject]) -> None:
        """Begin with the host lane of all cases that a child process can find."""
        for subject in subjects:
            if subject.reference is not None and subject.reference not in self.shared:
                self.shared.add(subject.reference)
                self.shares.begin(subject.reference)

    def on_host(self, subject: _Subject) -> None:
        """Run the case's batches on the host lane, or wait for the child that does."""
        from cuverify.check_host import check_on_host

        def told(label: str, done: int, total: int) -> None:
            self.progress(f"{subject.name}: host lane {label}", done, total)

        if subject.reference in self.shared:
            result = self.shares.result(subject.reference, subject.name, told)
        else:
            result = check_on_host(
                subject.case,
                seed=self.seed,
                examples=self.examples,
                progress=told,
                second_opinions=self.second_opinions,
            )
        self.opinions += result.second_opinions
        if result.no_second_opinion is not None:
            self.no_opinions.add(f"{subject.name}: {result.no_second_opinion}")
        subject.host_batches, subject.host_runs = result.batches, result.runs
        subject.dynamic_shared = {**subject.dynamic_shared, **result.dynamic_shared}
        for number, finding in enumerate(result.findings):  # merged already
            self.findings.add(finding, subject.name, number)
        self._add_shared_memory(subject)

    def _add_shared_memory(self, subject: _Subject) -> None:
        """Add a finding for each kernel whose launches need more shared memory than a GPU has."""
        from cuverify.compile import max_shared_bytes

        for _, entry in subject.resources:
            kernel, arch, static = entry["kernel"], entry["arch"], entry["static shared B"]
            needed = static + subject.dynamic_shared.get(kernel, 0)
            limit = max_shared_bytes(arch)
            if needed > limit:
                finding = Finding(
                    "compile-shared",
                    "warning",
                    f"{subject.name}: `{kernel}` was launched with {needed} bytes of shared "
                    f"memory; a block has at most {limit} on {arch}",
                    evidence={"case": subject.name, "static": static, "dynamic": needed - static},
                    fix="Use smaller tiles on that architecture.",
                )
                self.findings.add(finding, subject.name, kernel, arch)

    def on_device(self, subject: _Subject) -> None:
        """Run the case's GPU batches, eagerly and in replayed graphs, in child processes."""
        from cuverify.check_device import check_on_device, jobs_of_this_machine

        if subject.reference is None:
            self._gap(
                f"{subject.name}: GPU batches",
                "the case is an object, and a child process finds a case by a reference only "
                "(module:CASE, file.py:CASE)",
            )
            return
        result = check_on_device(
            subject.reference,
            seed=self.seed,
            examples=self.examples,
            silence_s=self.silence_s,
            jobs=jobs_of_this_machine(),
            progress=lambda label, done, total: self.progress(
                f"{subject.name}: GPU {label}", done, total
            ),
        )
        subject.gpu_batches = result.batches
        subject.gpu_replays = result.totals.get("replays", 0)
        self.device = result.device or self.device
        for name, value in result.totals.items():
            self.totals[name] = self.totals.get(name, 0) + value
        for finding in result.findings:
            told = map(finding.evidence.get, ("output", "kernel", "stage", "ending"))
            self.findings.add(of_case(subject.name, finding), subject.name, finding.where, *told)
        for gap in result.gaps:
            self._gap(f"{subject.name}: {gap.subject}", gap.detail)

    def _gap(self, subject: str, reason: str) -> None:
        self.gaps[subject, reason] = self.gaps.get((subject, reason), 0) + 1

    def report(self, subjects: Sequence[_Subject], no_gpu: str | None) -> Report:
        """Put everything together."""
        from cuverify import env

        report = Report(f"check of {', '.join(subject.name for subject in subjects) or 'nothing'}")
        report.environment = {**env.inspect().versions, **self.device}
        resources = [row for subject in subjects for row in _resource_rows(subject)]
        report.tables.append(Table("resources", _RESOURCE_COLUMNS, resources))
        report.tables.append(Table("cases", _CASE_COLUMNS, [_case_row(s) for s in subjects]))
        report.findings.extend(self.findings)
        report.coverage.extend(self._compile_coverage())
        report.coverage.append(_host_coverage(subjects))
        report.coverage.extend(self._opinion_coverage())
        report.coverage.append(self._capture_coverage(no_gpu))
        for (subject, reason), times in self.gaps.items():
            detail = reason if times == 1 else f"{reason} ({times} times)"
            report.coverage.append(Coverage(subject, "not inspected", detail))
        return report

    def _compile_coverage(self) -> Iterator[Coverage]:
        if not self.architectures:
            yield Coverage("compile", "not inspected", "no architecture was asked for")
        for arch in self.architectures:
            if arch not in self.compiled:
                yield Coverage(arch, "not inspected", "nothing compiled")
                continue
            kernels = _count(self.compiled[arch], "kernel")
            ran = "run" if arch == self.device.get("arch") else "not run"
            yield Coverage(arch, "inspected", f"{kernels} compiled and resource-checked, {ran}")

    def _opinion_coverage(self) -> Iterator[Coverage]:
        name = "second opinion"
        if self.opinions:
            batches = _count(self.opinions, "batch", "batches")
            yield Coverage(name, "inspected", f"{batches} under ASan and UBSan of {_compiler()}")
        reasons = "; ".join(sorted(self.no_opinions))
        if not self.second_opinions:
            reasons = "not asked for"
        elif not self.opinions and not reasons:
            reasons = "no batch ran cleanly under our own checkers"
        if reasons:
            yield Coverage(name, "not inspected", reasons)

    def _capture_coverage(self, no_gpu: str | None) -> Coverage:
        if no_gpu is not None:
            return Coverage("capture", "not inspected", no_gpu)
        if not self.totals.get("captures"):
            return Coverage("capture", "not inspected", "no capture came to its end")
        counts = [
            _count(self.totals["captures"], "capture"),
            f"{_count(self.totals['launches'], 'launch', 'launches')} recorded",
            _count(self.totals["replays"], "judged replay"),
        ]
        if self.totals["kernel_nodes"]:  # else not walked, which is a line of its own
            counts.insert(2, _count(self.totals["kernel_nodes"], "kernel node"))
        device = self.device.get("GPU", "the GPU")
        return Coverage("capture", "inspected", f"{', '.join(counts)} on {device}")


def _host_coverage(subjects: Sequence[_Subject]) -> Coverage:
    if not any(subject.host_runs for subject in subjects):
        return Coverage("host lane", "not inspected", "no run came to its end")
    batches = _count(sum(subject.host_batches for subject in subjects), "batch", "batches")
    schedules = f"{len(SCHEDULES)} schedules"
    return Coverage("host lane", "inspected", f"{batches}, {schedules}, compiler {_compiler()}")


def _compiler() -> str:
    """Return the name and version of the compiler that the host lane used."""
    from cuverify.host.options import current_options
    from cuverify.host.toolchain import find_compiler

    compiler = find_compiler(current_options().compiler)
    version = re.search(r"\d+(\.\d+)+", compiler.version)
    return f"{compiler.name} {version[0] if version else compiler.version}"


def _resource_rows(subject: _Subject) -> Iterator[list[Any]]:
    for values, entry in subject.resources:
        yield [
            subject.name,
            entry["kernel"],
            dict(values) or None,
            entry["arch"],
            entry["registers"],
            entry["spill B"],
            entry["static shared B"],
            subject.dynamic_shared.get(entry["kernel"]),
            entry["threads"],
        ]


def _case_row(subject: _Subject) -> list[Any]:
    return [
        subject.name,
        subject.kernels,
        subject.host_batches,
        subject.host_runs,
        subject.gpu_batches,
        subject.gpu_replays,
    ]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"
