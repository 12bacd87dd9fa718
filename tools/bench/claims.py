"""Claims of papers, each as a small task with predictions that were committed before the runs; five seeds.

    python tools/bench/claims.py [--only decoupled,topr] [--seeds 1,2] [--jobs 2] [--table]
    python tools/bench/claims.py --readme     # docs/results/critic-against-group.svg, from the finished runs
    python tools/bench/claims.py --solvable   # the sums that SmolLM2 sometimes solves, for the claim bpco

Tasks, arms and predictions are tools/bench/claims/predictions.yaml. Each finished run is a file under
tools/bench/claims/finished and is not done again, so that the command goes on where it was stopped. Runs in one process
use --jobs processes of one thread; then one arm of each such claim, and the claims that need it, use the real loop: one
Ray cluster and one SGLang server for each checkpoint. Verdicts are computed from the finished runs and, with the
pictures, put into docs/results/claims.md; --table does only this.
"""

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from claims_bench.page import draw_claim, fill_page, format_page, judge_all
from claims_bench.runs import Run, build_overrides, load_run, save_run, train_once
from claims_bench.specs import Claim, load_claims
from claims_bench.verdicts import Verdict, judge_claim

from megarl.config.load import load_config
from megarl.data.build import build_source
from megarl.reward.scorer import build_scorer
from megarl.rollout.collector import build_collector
from megarl.rollout.engine import SGLangEngine
from megarl.run.inputs import load_inputs
from megarl.run.job import open_resources
from megarl.run.signals import stopping_on_signals

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(__file__).with_suffix("")
FINISHED = OUT / "finished"
PAGE = ROOT / "docs" / "results" / "claims.md"
PICTURE = ROOT / "docs" / "results" / "critic-against-group.svg"
README_CLAIM = "luck"
README_ARMS = {"critic": "critic, lambda 0.5", "0.95": "critic, lambda 0.95", "group": "no critic (GRPO)"}
REAL_SEED = 1
"""Seed of the cross-checks with the real loop"""
NUM_SOLVABLE, NUM_TRIES, SOLVABLE = 32, 16, (0.2, 0.8)
"""Problems of the claim bpco, samples of each, and the share of them that is right"""


def find_path(claim: str, arm: str, seed: int, is_check: bool = False) -> Path:
    return FINISHED / f"{claim}_{arm}_{seed}{'_real' if is_check else ''}.json"


def run_here(claim: Claim, arm: str, seed: int) -> Run:
    """One run in this process, saved."""
    run = train_once(claim, arm, seed, OUT)
    save_run(find_path(claim.name, arm, seed), run)
    return run


def end_with(parent: int) -> None:
    """From now on this process ends when its parent does: nobody would wait for its run."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def describe(run: Run) -> str:
    shares = " ".join(f"{share:.2f}" for share in run.right[:: max(1, len(run.right) // 8)])
    return f"{run.claim} {run.arm}, seed {run.seed}, {run.loop}: {shares}  ({run.seconds:.0f} s)"


def run_in_processes(missing: Sequence[tuple[Claim, str, int]], jobs: int) -> None:
    """All of them, `jobs` at a time; a run that fails is reported and left out."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, end_with, (os.getpid(),)) as pool:
        running = {pool.submit(run_here, *each): each for each in missing}
        try:
            for done in concurrent.futures.as_completed(running):
                claim, arm, seed = running[done]
                if error := done.exception():
                    print(f"{claim.name} {arm}, seed {seed}: failed: {type(error).__name__}: {error}", flush=True)
                else:
                    print(describe(done.result()), flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_real(missing: Sequence[tuple[Claim, str, int]]) -> None:
    """With the real loop; runs of one checkpoint share Ray and the server."""
    by_checkpoint: dict[str, list[tuple[Claim, str, int]]] = {}
    for claim, arm, seed in missing:
        by_checkpoint.setdefault(claim.arms[arm].task, []).append((claim, arm, seed))
    for task, each in by_checkpoint.items():
        # The first arm with a critic: Ray gets room for it.
        claim, arm, seed = max(each, key=lambda found: "critic" in " ".join(found[0].arms[found[1]].keys))
        config = load_config(build_overrides(claim.arms[arm], seed, OUT))
        with stopping_on_signals(), open_resources(config, load_inputs(config), OUT / "logs" / task) as hosts:
            for claim, arm, seed in each:
                try:
                    run = train_once(claim, arm, seed, OUT, hosts)
                except Exception:
                    print(f"{claim.name} {arm}, seed {seed}, real loop: failed:\n{traceback.format_exc()}", flush=True)
                    continue
                save_run(find_path(claim.name, arm, seed, is_check=claim.loop != "real"), run)
                print(describe(run), flush=True)


def list_missing(claims: Sequence[Claim], seeds: Sequence[int] | None) -> list[tuple[Claim, str, int]]:
    """What has no file, of these claims' arms and seeds, a whole seed after the other."""
    return [
        (claim, arm, seed)
        for claim in claims
        for seed in (seeds or claim.seeds)
        for arm in claim.arms
        if not find_path(claim.name, arm, seed).exists()
    ]


def load_finished(claim: Claim) -> dict[tuple[str, int], Run]:
    paths = {(arm, seed): find_path(claim.name, arm, seed) for arm in claim.arms for seed in claim.seeds}
    return {key: load_run(path) for key, path in paths.items() if path.exists()}


def write_page(claims: dict[str, Claim]) -> None:
    """The page and its pictures."""
    runs = {name: load_finished(claim) for name, claim in claims.items()}
    checks = {
        name: find_path(name, claim.cross_checked, REAL_SEED, is_check=True)
        for name, claim in claims.items()
        if claim.cross_checked is not None
    }
    real = {name: load_run(path) for name, path in checks.items() if path.exists()}
    for name, found in runs.items():
        if found:
            (OUT / f"{name}.svg").write_text(draw_claim(list(claims[name].arms), found))
    PAGE.write_text(fill_page(PAGE.read_text(), format_page(claims, runs, real)))
    verdicts = [judge_claim(claim, judge_all(claim, runs[name])) for name, claim in claims.items()]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict)
    print(f"{len(claims)} claims: {counts}")


def draw_readme(claims: dict[str, Claim]) -> None:
    """Raises SystemExit where a run of it is missing."""
    claim = claims[README_CLAIM]
    runs = {key: run for key, run in load_finished(claim).items() if key[0] in README_ARMS}
    if len(runs) < len(README_ARMS) * len(claim.seeds):
        raise SystemExit(
            f"--readme: {len(runs)} of {len(README_ARMS) * len(claim.seeds)} runs of {claim.name} are there"
        )
    PICTURE.write_text(draw_claim(list(README_ARMS), runs, README_ARMS))


def write_solvable() -> None:
    """tools/bench/claims/solvable.jsonl: 32 sums that untrained SmolLM2 solves in 20 to 80% of 16 samples; the first of
    512 drawn. solvable_heldout.jsonl has two others. Raises SystemExit where there are fewer."""
    config = load_config(["model=smollm2_135m", "algo=rloo", "data.num_train=512", "seed=1"])
    inputs = load_inputs(config)
    problems = build_source(config.data).load(config.seed).train
    with contextlib.ExitStack() as stack:
        stack.enter_context(stopping_on_signals())
        hosts = stack.enter_context(open_resources(config, inputs, OUT / "logs" / "solvable"))
        urls = hosts.start_servers().result()
        keys = {"seed": config.seed, "check_processes": hosts.check_servers, "api_key": hosts.api_key}
        engine = stack.enter_context(
            contextlib.closing(SGLangEngine(urls, inputs.checkpoint, config.rollout, **keys))  # type: ignore[arg-type]
        )
        scorer = stack.enter_context(contextlib.closing(build_scorer(config.reward)))
        collector = build_collector(config, engine, scorer, inputs.conversation)
        samples = collector.sample(inputs.data.train, NUM_TRIES, key="solvable")
    assert [p.answer for p in inputs.data.train] == [p.answer for p in problems]
    found = []
    for number, problem in enumerate(problems):
        share = sum(s.score.correct for s in samples if s.group == number) / NUM_TRIES
        if SOLVABLE[0] <= share <= SOLVABLE[1]:
            found.append(json.dumps({"prompt": problem.messages[-1].content, "answer": problem.answer, "share": share}))
    print(f"{len(found)} of {len(problems)} sums are solved in {SOLVABLE[0]:.0%} to {SOLVABLE[1]:.0%} of {NUM_TRIES}")
    if len(found) < NUM_SOLVABLE + 2:
        raise SystemExit(f"--solvable: {NUM_SOLVABLE + 2} are needed")
    (OUT / "solvable.jsonl").write_text("\n".join(found[:NUM_SOLVABLE]) + "\n")
    (OUT / "solvable_heldout.jsonl").write_text("\n".join(found[NUM_SOLVABLE : NUM_SOLVABLE + 2]) + "\n")


def choose(claims: dict[str, Claim], only: str | None) -> list[Claim]:
    """Raises SystemExit that lists the claims for a name that is none."""
    for name in (names := only.split(",") if only else list(claims)):
        if name not in claims:
            raise SystemExit(f"--only: {name!r} is none of {', '.join(claims)}")
    return [claims[name] for name in names]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="claims, by commas")
    parser.add_argument("--seeds", help="by commas; those of the claim are left to be run")
    parser.add_argument("--jobs", type=int, default=2, help="processes of runs in one process")
    parser.add_argument("--loop", choices=("all", "in_process", "real"), default="all", help="which runs to do")
    parser.add_argument("--table", action="store_true", help="train nothing: page and pictures of the finished runs")
    parser.add_argument("--readme", action="store_true", help="only the README's picture, of the finished runs")
    parser.add_argument("--solvable", action="store_true", help="only the problems of the claim bpco")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    # reward=function is loaded in processes of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(OUT.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    claims = load_claims()
    if args.readme:
        return draw_readme(claims)
    if args.solvable:
        return write_solvable()
    chosen = choose(claims, args.only)
    seeds = [int(seed) for seed in args.seeds.split(",")] if args.seeds else None
    if not args.table:
        here = list_missing([claim for claim in chosen if claim.loop != "real"], seeds)
        if here and args.loop != "real":
            run_in_processes(here, args.jobs)
        real = list_missing([claim for claim in chosen if claim.loop == "real"], seeds)
        for claim in chosen:
            if claim.cross_checked and not find_path(claim.name, claim.cross_checked, REAL_SEED, True).exists():
                real.append((claim, claim.cross_checked, REAL_SEED))
        if real and args.loop != "in_process":
            run_real(real)
    write_page(claims)
    return None


if __name__ == "__main__":
    main()
