"""Results as Markdown: ratios first, each figure with its range over the repeats."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .rows import Target


def good_runs(results: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The runs of a row that finished and trained on the given tokens."""
    return [run for run in results["runs"] if run["row"] == name and "error" not in run]


def fastest(results: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The row with the highest median rate of those that finished."""
    rates = {name: _median(runs, "tokens_per_s") for name in names if (runs := good_runs(results, name))}
    return max(rates, key=lambda name: rates[name], default=None)


def peer_of(results: Mapping[str, Any], target: Target) -> str:
    """The peer's row; of several (NAME*) the fastest one."""
    if not target.peer.endswith("*"):
        return target.peer
    names = (row["name"] for row in results["rows"] if row["name"].startswith(target.peer[:-1]))
    return fastest(results, names) or target.peer


def ratios(results: Mapping[str, Any], target: Target) -> list[float]:
    """Tokens/s of the row over the peer's, pair by pair of the same repeat."""
    rates = [
        {run["repeat"]: run["tokens_per_s"] for run in good_runs(results, name)}
        for name in (target.row, peer_of(results, target))
    ]
    return [rates[0][repeat] / rates[1][repeat] for repeat in sorted(rates[0].keys() & rates[1].keys())]


def markdown(results: Mapping[str, Any], targets: Sequence[Target] = ()) -> str:
    """The whole report."""
    header, protocol = results["header"], results["protocol"]
    facts = ", ".join(f"{key} {value}" for key, value in {**header["gpu"], **header["versions"]}.items())
    lines = [
        f"{header['started']}. {facts}.",
        f"{'; '.join(results['inputs'])}. {protocol['num_steps']} steps, the first {protocol['left_out_steps']} left "
        f"out; a fresh process each, order {protocol['order']}; median (lowest to highest of the repeats).",
        _clocks(results),
        cap_line(header),
        "",
    ]
    compared = [target for target in targets if ratios(results, target)]
    if compared:
        lines += ["| ratio | measured | target | verdict |", "|---|---|---|---|"]
        lines += [_ratio_line(results, target) for target in compared]
        lines.append("")
    lines += [
        "| row | system | tokens/s | label tokens/s | step p50 / p95 s | peak GiB, allocated / reserved | "
        "memory | launch to first step s | TFLOP/s | loss, first and last | parity |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row_line(results, row) for row in results["rows"]]
    lines += ["", *_curves(results), *(f"- {line}" for line in sweep_lines(results))]
    failed = [run for run in results["runs"] if "error" in run]
    lines += [
        "",
        *(f"- {run['row']} #{run['repeat'] + 1} {end_of([run])}: `{_one_line(run['error'])}`" for run in failed),
    ]
    return "\n".join(lines).rstrip() + "\n"


def summary(results: Mapping[str, Any], targets: Sequence[Target] = ()) -> str:
    """What a terminal shows: each row's rate and peak, each ratio beside its target."""
    lines, width = [cap_line(results["header"])], max(len(row["name"]) for row in results["rows"])
    for row in results["rows"]:
        if runs := good_runs(results, row["name"]):
            peak = f", peak {_median(runs, 'peak_allocated_gib'):.1f} GiB" if "peak_allocated_gib" in runs[0] else ""
            lines.append(f"{row['name']:<{width}} {_range_over_repeats(runs, 'tokens_per_s')} tokens/s{peak}")
            lines.append(f"{'':<{width}} {memory_words(runs)}".rstrip())
        elif runs := [run for run in results["runs"] if run["row"] == row["name"]]:
            lines.append(f"{row['name']:<{width}} {end_of(runs)}")
    for target in targets:
        if values := ratios(results, target):
            ratio = f"{statistics.median(values):.2f}x, target {target.min_ratio:g}x"
            lines.append(f"{target.row} / {peer_of(results, target)}: {ratio}")
    return "\n".join(filter(None, [*lines, *sweep_lines(results)]))


def end_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """How runs without figures ended."""
    return "out of memory" if any("out_of_memory" in run for run in runs) else "failed"


def cap_line(header: Mapping[str, Any]) -> str:
    """What was pretended of the GPU, and what was not; nothing for the GPU as it is."""
    gib, capability = header.get("cap_gib"), header.get("capability")
    words = [f"Every run saw {gib:.1f} GiB of memory."] if gib else []
    if capability:
        words.append(f"Kernels of flatout: chosen as on capability {capability}; other trainers keep this GPU's.")
    if words:
        name = header["gpu"].get("name", "this GPU")
        words.append(f"Arithmetic and bandwidth are this GPU's ({name}), not a small card's.")
    return " ".join(words)


def memory_words(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row's share of the cap; of ours also the planned peak beside the measured one, and what was chosen."""
    run, words = runs[0], []
    if "cap_share" in run:
        words.append(f"{_median(runs, 'cap_share'):.0%} of the cap")
    if "planned_gib" in run:
        words.append(f"planned {run['planned_gib']:.1f} GiB ({run['planned_error_percent']:+.1f}% of the peak)")
    if "recompute" in run:
        words.append(f"recompute {run['recompute']}, micro-batches of {run['micro_batch_tokens']:,} tokens")
    if run.get("alloc_retries"):
        words.append(f"the allocator freed its cache {run['alloc_retries']} times")
    if run.get("out_of_memory_steps"):
        words.append("smaller ones after it ran out of memory")
    return ", ".join(words)


def sweep_lines(results: Mapping[str, Any]) -> list[str]:
    """Each swept row's own settings beside the best of the others."""
    lines = []
    for row in results["rows"]:
        variants = [other["name"] for other in results["rows"] if other.get("family") == row["name"]]
        runs, best = good_runs(results, row["name"]), fastest(results, variants)
        if runs and best:
            share = _median(runs, "tokens_per_s") / _median(good_runs(results, best), "tokens_per_s")
            lines.append(f"{row['name']}: auto is {share:.0%} of the best, {best}")
    return lines


def _curves(results: Mapping[str, Any]) -> list[str]:
    """How far the losses of a row over several GPUs are from those of the same row on one, over the first runs."""
    lines = []
    for row in results["rows"]:
        alone = row["name"].partition("@")[0]
        if alone == row["name"] or not (pair := [good_runs(results, name) for name in (row["name"], alone)])[0]:
            continue
        if not pair[1] or digests_differ(*(runs[0] for runs in pair)):
            continue
        curves = zip(*(runs[0]["losses"] for runs in pair), strict=True)
        worst = max(abs(many - one) / one for many, one in curves)
        num_steps = len(pair[0][0]["losses"])
        lines.append(f"- loss of {row['name']} beside {alone}: {worst:.1e} apart at most over {num_steps} steps")
    return lines


def digests_differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two runs trained on other tokens, or on other samples a step."""
    return bool(first["digest"] != second["digest"] or len(first["losses"]) != len(second["losses"]))


def _clocks(results: Mapping[str, Any]) -> str:
    """The GPU's clock right after each run: pairs at clocks more than 2 % apart are no fair pair."""
    found = [float(run["gpu_after"]["clocks.sm"]) for run in results["runs"] if "clocks.sm" in run.get("gpu_after", {})]
    return f"SM clock after the runs: {min(found):.0f} to {max(found):.0f} MHz." if found else ""


def _ratio_line(results: Mapping[str, Any], target: Target) -> str:
    values = ratios(results, target)
    runs = good_runs(results, target.row)
    rate = statistics.median(run["tokens_per_s"] for run in runs)
    wanted, met = [f"{target.min_ratio:g}x"], [statistics.median(values) >= target.min_ratio]
    if target.min_tokens_per_s is not None:
        wanted.append(f"{target.min_tokens_per_s:,.0f} tokens/s")
        met.append(rate >= target.min_tokens_per_s)
    measured = f"**{statistics.median(values):.2f}x** ({min(values):.2f} to {max(values):.2f}), {rate:,.0f} tokens/s"
    if target.max_gib is not None:
        peak_gib = max(run.get("peak_allocated_gib", 0.0) for run in runs)
        wanted.append(f"<= {target.max_gib:g} GiB")
        met.append(peak_gib <= target.max_gib)
        measured += f", {peak_gib:.1f} GiB"
    verdict = "met" if all(met) else "missed"
    return f"| {target.row} / {peer_of(results, target)} | {measured} | >= {', '.join(wanted)} | {verdict} |"


def _row_line(results: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    runs = good_runs(results, row["name"])
    name = row["name"] + (" (its defaults)" if row["settings"].get("defaults") else "")
    if not runs:
        ended = [run for run in results["runs"] if run["row"] == row["name"]]
        return f"| {name} | {row['system']} | {end_of(ended) if ended else '-'} | {'- | ' * 8}".rstrip()
    # more than one row in a batch means that it was padded
    name += " (padded)" if runs[0].get("batch_shape", [1])[0] > 1 else ""
    seconds = f"{_median(runs, 'step_p50_s'):.3f} / {_median(runs, 'step_p95_s'):.3f}"
    peaks = " / ".join(
        f"{_median(runs, key):.1f}" for key in ("peak_allocated_gib", "peak_reserved_gib") if key in runs[0]
    )
    # of ours it is known how much of it is reading the weights
    starts = ", ".join(
        f"{run['launch_to_first_step_s']:.1f}" + (f" (loading {run['load_s']:.1f})" if "load_s" in run else "")
        for run in runs
    )
    losses = f"{runs[0]['losses'][0]:.4f}, {runs[0]['losses'][-1]:.4f}"
    gate = {True: "green", False: "RED", None: "not gated"}[row.get("parity")] if row["system"] == "flatout" else ""
    rates = _range_over_repeats(runs, "tokens_per_s"), _range_over_repeats(runs, "label_tokens_per_s")
    cells = (*rates, seconds, peaks, memory_words(runs), starts, _teraflops(results, row), losses, gate)
    return f"| {name} | {row['system']} | {' | '.join(cells)} |"


def _teraflops(results: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """What the row achieved at the FLOPs a token that flatout counts for its shape (nothing recomputed, no padding)."""
    shapes = {other["name"]: other["shape"] for other in results["rows"]}
    counted = [
        run["flops_per_token"]
        for run in results["runs"]
        if "flops_per_token" in run and shapes[run["row"]] == row["shape"]
    ]
    return f"{counted[0] * _median(good_runs(results, row['name']), 'tokens_per_s') / 1e12:,.0f}" if counted else ""


def _median(runs: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


def _range_over_repeats(runs: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [run[key] for run in runs]
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _one_line(text: str) -> str:
    return " ".join(text.split())[-300:].replace("|", "/").replace("`", "'")
