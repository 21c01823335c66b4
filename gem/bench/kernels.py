"""Measure the rows of config/kernels.tsv: correctness first, then time, rates, memory and the chip's bound.

    python -m gem.bench.kernels --tier gpu --experiment kernels --cases 'jfa_self_*' --impls v2,v4

Each implementation of each case writes its own part as soon as it is done. A result that does not match the reference
gets no time but status failed; what cannot run here gets status unsupported with the reason, out of memory gets oom.
Filters measure less; a part that is measured again replaces the old one as a whole. With --processes everything is
compiled first, side by side (gem.bench.precompile); with --limit-s no row begins after that many seconds, the exit
status is 3 and GEM_RESUME=1 goes on there.
"""

from __future__ import annotations

import gc
import sys
import time
from fnmatch import fnmatchcase

import torch

from gem import hardware, record, workflow
from gem.bench import cases, low_precision, peers
from gem.bench.ceilings import measure_ceilings
from gem.bench.timing import measure
from gem.cli import Parser
from gem.progress import Progress
from kernels import kept
from kernels.testing import error_budget, relative_error, snr_db

SHARED_SOURCES = (
    "kernels/schedule.py", "kernels/kept.py", "kernels/triton_common.py", "kernels/tlx_common.py",
    "kernels/tlx_activations.py", "kernels/tlx_pipeline.py", "kernels/tlx_backward.py",
    "kernels/tlx_backward_kernel.py", "kernels/tlx_backward_consumer.py", "kernels/tlx_backward_order.py",
)  # fmt: skip
FOLDERS = cases.FOLDERS | dict.fromkeys(("layer_norm", "rms_norm", "norm_gdpa_norm"), "fused_norm")
FOLDERS |= {"mx_linear": "mxfp8", "norm_quantize": "fused_norm"}


OUT_OF_TIME = 3  # exit status
COMPILED = {"flex", "compiled_eager", "compiled_rotary"}  # torch.compile for the shapes of a row


class DeviceLostError(RuntimeError):
    """The CUDA context is broken: nothing more can be measured in this process."""


class Bench:
    """One process: device and ceilings are shared by all its cases."""

    def __init__(self, experiment: str, run_name: str, config: dict, phases: tuple[str, ...] = ("fwd", "bwd")):
        self.run_name, self.config, self.phases = run_name, config, phases
        self.device = hardware.open_device(config["device"])
        self.chip = hardware.device_name(self.device)
        self.ceilings = measure_ceilings(run_name, self.device, config["bench"], f"ceilings-{experiment}")
        # What is imported by now stays: a collection between rows then looks at what the rows made, and takes
        # milliseconds instead of tenths of a second.
        gc.freeze()

    def run_case(self, row: dict, impls: list[str]) -> None:
        """Measure the named implementations of one row."""
        todo = [name for name in impls if not record.already_measured(self.run_name, run_id(row, name), row)]
        if not todo:
            return
        phases = tuple(phase for phase in row["phases"].split(",") if phase in self.phases)
        case = cases.build(row, self.device)
        exact = cases.exact(case, phases)
        held = self.allocated()
        try:
            for name in todo:
                with self.open_run(row, name) as run:
                    self.run_impl(run, case, exact, name, phases)
                # Torch keeps the memory that an implementation gave back for the next one; cycles may not give it back.
                if self.allocated() > held:
                    gc.collect()
        finally:
            case = exact = None
            self.release()

    def open_run(self, row: dict, name: str) -> record.Run:
        config = {"device": self.config["device"], "bench": self.config["bench"], "phases": self.phases}
        return record.Run(
            self.run_name,
            row["experiment"],
            name=run_id(row, name),
            case_row=row,
            config=config | {"ceilings": vars(self.ceilings)},
            sources=sources_of(row["op"], name),
        )

    def run_impl(self, run: record.Run, case: cases.Case, exact: cases.Exact, name: str, phases: tuple) -> None:
        """All phases of one implementation; a failure becomes rows with a status and a reason."""
        call = result = None
        failure = None
        try:
            if COMPILED & set(name.split(":")):
                # torch.compile runs a function plainly once it has met eight shapes of it; every row is a new one.
                torch.compiler.reset()
            call = peers.prepare(case, name)
            result = call.forward()
            self.synchronize()
        except Exception as error:
            failure = self.status_of(error)
        for phase in phases:
            base = {"case": case.row["case"], "subject": case.op, "impl": name, "phase": phase}
            state = failure
            if state is None:
                try:
                    self.measure_phase(run, case, exact, call, result, base)
                    continue
                except Exception as error:
                    state = self.status_of(error)
            status, reason = state
            run.add(**base, metric="time_ms", status=status, note=reason)
            if isinstance(reason, Lost):
                run.write()
                raise DeviceLostError(f"{case.row['case']} {name}: {reason}")

    def measure_phase(self, run, case, exact, call, result, base) -> None:
        phase = base["phase"]
        work = call.forward if phase == "fwd" else (lambda: call.backward(result))
        values = work()
        outputs = {"o": call.output(values)} if phase == "fwd" else dict(zip(peers.GRADIENTS, values[:3], strict=False))
        problem = self.check(run, case, exact, call, outputs, base)
        del outputs, values
        if problem:
            run.add(**base, metric="time_ms", status="failed", note=problem)
            return
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            hardware.reset_peak_memory(self.device)
            work()
            self.synchronize()
            extra = (torch.cuda.max_memory_allocated(self.device) - before) / 2**30
            run.add(**base, metric="peak_mem_gib", p50=extra, note="beyond inputs and saved tensors")
        bench = self.config["bench"]
        timing = measure(
            work,
            device=self.device.type,
            warmup=1,  # and two calls before it, for the check and for the peak of memory
            warmup_ms=bench["warmup_ms"],
            repeat_ms=bench["repeat_ms"],
            min_repeats=5,
        )
        spread = {"p20": timing.p20, "p80": timing.p80, "n": timing.n}
        run.add(**base, metric="time_ms", p50=timing.p50, **spread, note=call.note)
        seconds = timing.p50 / 1e3
        tflops = case.flops(phase) / seconds / 1e12
        if tflops:
            run.add(**base, metric="tflops", p50=tflops, n=timing.n)
        run.add(**base, metric="hbm_gbps", p50=case.bytes(phase) / seconds / 1e9, n=timing.n)
        if call.gemms:
            run.add(**base, metric="gemms", p50=call.gemms[phase])
        if self.ceilings.gemm_bf16_tflops and tflops:
            run.add(**base, metric="share_of_gemm", p50=tflops / self.ceilings.gemm_bf16_tflops, n=timing.n)
        self.record_bound(run, case, base, timing, call.dtype)
        self.record_lists(run, work, base)

    def record_lists(self, run, work, base) -> None:
        """Time to build the lists of tiles that the call finds ready, once a batch, outside its own time."""
        with kept.asked() as builds:
            work()
        if builds:
            lists = measure(
                lambda: [build() for build in builds], device=self.device.type, warmup=1,
                repeat_ms=self.config["bench"]["repeat_ms"] / 4, min_repeats=5,
            )  # fmt: skip
            spread = {"p20": lists.p20, "p80": lists.p80, "n": lists.n}
            run.add(**base, metric="schedule_ms", p50=lists.p50, **spread, note=f"{len(builds)} lists, once a batch")

    def record_bound(self, run, case, base, timing, dtype=None) -> None:
        try:
            bound = case.bound(base["phase"], self.chip, self.ceilings, dtype)
        except ValueError as error:
            run.add(**base, metric="bound_ms", status="unsupported", scope="modelled", note=str(error))
            return
        run.add(**base, metric="bound_ms", p50=bound.time_ms, scope="modelled", note=bound.limiter)
        run.add(**base, metric="share_of_bound", p50=bound.time_ms / timing.p50, n=timing.n)

    def check(self, run, case: cases.Case, exact: cases.Exact, call, outputs: dict, base: dict) -> str | None:
        """Record the errors against float64; the reason why the result is wrong, or None."""
        worst_error, worst_snr, problem = 0.0, float("inf"), None
        for name, value in outputs.items():
            if name not in exact.values or value is None:
                continue
            right, own = exact.values[name]
            value = value.detach() if isinstance(value, torch.Tensor) else value  # 8-bit operands come as pairs
            rows = exact.pick(name, call.unpack(name, value))
            if rows.shape != right.shape:
                return f"{name}: shape {tuple(rows.shape)}, expected {tuple(right.shape)}"
            if not bool(rows.isfinite().all()):
                problem = problem or f"{name}: {int((~rows.isfinite()).sum())} elements are not finite"
                continue
            worst_error = max(worst_error, relative_error(rows, right))
            worst_snr = min(worst_snr, snr_db(rows, right))
            budget = error_budget(own, right, roundings=roundings(own.dtype, case))
            error = float((rows.double() - right.double()).abs().max()) if rows.numel() else 0.0
            if call.budget is not None:  # 8-bit operands: the error of norms, which the format sets
                error, budget = relative_error(rows, right), call.budget
            if error > budget:
                problem = problem or f"{name}: error {error:.3g} above the budget {budget:.3g} of same-dtype eager"
        if problem is None or "finite" not in problem:
            run.add(**base, metric="rel_err", p50=worst_error)
            if worst_snr < float("inf"):
                run.add(**base, metric="snr_db", p50=worst_snr)
        run.add(**base, metric="correct", p50=0 if problem else 1, note=problem or "")
        return problem

    def status_of(self, error: Exception) -> tuple[str, str]:
        """(status, reason) of a failure."""
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if isinstance(error, peers.Unsupported):
            return "unsupported", reason
        if isinstance(error, torch.cuda.OutOfMemoryError):
            self.release()
            return "oom", reason
        if isinstance(error, ValueError) and "allowed" in reason:
            return "unsupported", reason
        try:
            self.synchronize()
        except Exception:
            return "failed", Lost(reason)
        return "failed", f"{type(error).__name__}: {reason}"

    def allocated(self) -> int:
        """Bytes of live tensors on a GPU."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def synchronize(self) -> None:
        hardware.synchronize(self.device)

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class Lost(str):
    """A reason that ends the process."""


def roundings(dtype: torch.dtype, case: cases.Case) -> float:
    """Units of the last place that a result may differ beyond eager's own error.

    16-bit results are accumulated in float32, so two roundings of the output are all. A float32 sum of n terms in
    another order differs by about sqrt(n) units.
    """
    return 2.0 if dtype.itemsize < 4 else max(2.0, max(case.max_q, case.max_kv) ** 0.5)


def run_id(row: dict, impl: str) -> str:
    """Run of one implementation of one case; a name:option becomes name.option."""
    return f"{row['experiment']}-{row['case']}-{impl.replace(':', '.')}"


def sources_of(op: str, impl: str) -> tuple[str, ...]:
    """What decides the numbers of an implementation.

    The op's folder and shared kernel code, or for a peer how it is called.
    """
    if impl.partition(":")[0] in peers.PEERS:
        return ("gem/bench/peers.py",)
    if impl.endswith(":block_mask"):
        op = "jagged_attention"
    shared = [name for name in SHARED_SOURCES if (workflow.ROOT / name).exists()]
    if op in cases.LOW_PRECISION or impl.partition(":")[0] == low_precision.NAME:
        shared = ["kernels/mxfp8", "kernels/tlx_pipeline.py", *shared]
        return tuple(dict.fromkeys((f"kernels/{FOLDERS[op]}" if op == "norm_quantize" else shared[0], *shared)))
    return (f"kernels/{FOLDERS[op]}", *shared)


def chosen_impls(row: dict, filters: list[str]) -> list[str]:
    """Implementations of a row that a filter names: exactly, or by their name before the option."""
    names = row["impls"].split(",")
    return [name for name in names if not filters or {name, name.partition(":")[0]} & set(filters)]


def compile_beforehand(work: list[tuple[dict, list[str]]], run_name: str, device: str, processes: int) -> None:
    """Fill the compilers' caches for what is not measured yet, in processes of their own."""
    from gem.bench import precompile

    todo = [
        (row, impl)
        for row, impls in work
        for impl in impls
        if not record.already_measured(run_name, run_id(row, impl), row)
    ]
    precompile.run(sorted(todo, key=lambda job: not precompile.at_full_shape(job[1])), device, processes)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--experiment", required=True, help="column experiment of config/kernels.tsv")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    parser.add_argument("--cases", default="*", help="globs over case ids, separated by commas (default: all)")
    parser.add_argument("--impls", default="", help="implementations, separated by commas (default: the row's)")
    parser.add_argument("--phases", default="fwd,bwd", help="fwd, bwd or both (default)")
    parser.add_argument("--processes", type=int, default=1, help="on a GPU: compile that many rows at once beforehand")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds after which no row begins")
    args = parser.parse_args(argv)
    start = time.monotonic()
    try:
        if args.processes < 1 or not args.limit_s > 0:
            raise ValueError(f"--processes {args.processes}, --limit-s {args.limit_s}; allowed: at least 1, above 0")
        settings = workflow.load({"tier": args.tier})
        rows = settings.kernel_cases(args.experiment)
        rows = [row for row in rows if any(fnmatchcase(row["case"], glob) for glob in args.cases.split(","))]
        if not rows:
            wanted = f"experiment {args.experiment!r}, cases {args.cases!r}"
            raise ValueError(f"{wanted}: no row of config/kernels.tsv in tier {args.tier}")
        phases = tuple(args.phases.split(","))
        if not set(phases) <= {"fwd", "bwd"}:
            raise ValueError(f"--phases {args.phases!r}; allowed: fwd, bwd")
        filters = [name for name in args.impls.split(",") if name]
        work = [(row, chosen_impls(row, filters)) for row in rows]
        bench = Bench(args.experiment, args.run or settings.name, settings.config, phases)
        total = sum(len(impls) for _, impls in work)
        if args.processes > 1 and settings.uses_gpu:
            compile_beforehand(work, args.run or settings.name, settings.config["device"], args.processes)
        with Progress(total=total, unit="cases", label=args.experiment) as progress:
            for row, impls in work:
                if time.monotonic() - start >= args.limit_s:
                    print(f"stopped after {args.limit_s:g} s, before {row['case']}", file=sys.stderr)
                    return OUT_OF_TIME
                bench.run_case(row, impls)
                progress.advance(len(impls), case=row["case"])
    except (ValueError, OSError, DeviceLostError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
