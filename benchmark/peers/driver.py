"""What the drivers share: their flags, and one line of JSON on standard output per measurement."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--env-id", default="HalfCheetah-v4", help="the environment")
    parser.add_argument("--num-envs", type=int, default=64, help="parallel environments")
    parser.add_argument("--num-steps", type=int, default=32, help="steps of each environment per rollout")
    parser.add_argument("--num-minibatches", type=int, default=32, help="minibatches per epoch")
    parser.add_argument("--update-epochs", type=int, default=10, help="epochs per rollout")
    parser.add_argument("--warm-up-iterations", type=int, default=20, help="iterations before the first measurement")
    parser.add_argument("--iterations", type=int, default=10, help="iterations a measurement")
    parser.add_argument("--rounds", type=int, default=7, help="measurements")
    parser.add_argument(
        "--by-turns", action="store_true", help="wait for a line on standard input before each measurement"
    )
    args = parser.parse_args()
    args.batch_size = args.num_envs * args.num_steps
    args.minibatch_size = args.batch_size // args.num_minibatches
    return args


def measure(description: str, packages: list[str], make_training: Callable[..., Callable[[int], None]]) -> None:
    """Runs a driver: `make_training(args)` returns a function that trains that many iterations.

    The first line comes after the warm-up, `{"description": ..., "versions": {package: version}}`, then one line
    `{"steps_per_second": ...}` per measurement.
    """
    args = parse_args(description)
    lines, sys.stdout = sys.stdout, sys.stderr  # whatever the libraries print
    train = make_training(args)
    train(args.warm_up_iterations)
    first_line = {"description": description, "versions": {package: version(package) for package in packages}}
    print(json.dumps(first_line), file=lines, flush=True)
    for _ in range(args.rounds):
        if args.by_turns and not sys.stdin.readline():
            break
        start_time = time.perf_counter()
        train(args.iterations)
        steps = args.iterations * args.batch_size
        print(json.dumps({"steps_per_second": steps / (time.perf_counter() - start_time)}), file=lines, flush=True)
