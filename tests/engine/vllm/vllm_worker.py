"""Runs under torchrun: vLLM samples with the weights of a sharded student before and after it trains.

Saves each rank's responses, the student's weights, and teachers' log-probabilities of the rank's responses,
by the model's name. Arguments: a folder with a saved model for each of TIED; a `Vllm` as JSON; and URLs of
servers of the untied model, which sample instead of an engine.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from smopd.engine import distributed
from smopd.engine.remote.rollout import RemoteRollout
from smopd.engine.remote.servers import Servers
from smopd.engine.settings import TrainSettings, Vllm
from smopd.engine.student.student import Student
from smopd.engine.types import Rollout, Sampling
from smopd.engine.vllm.rollout import VllmRollout
from smopd.engine.weights.transport import publish_weights
from smopd.ops import LossSettings, LossTokens
from smopd.worlds import toy_world
from smopd.worlds.models import world_tokenizer
from tests.engine.tiny import END, VOCABULARY, assert_sampled_by, differ, ragged_rollouts, tiny_model
from tests.engine.vllm.served import fork_engines
from tests.ranks import on_ranks

PROMPTS = [(5, 9, 11), (7,), (20, 21, 22, 23, 24, 25), (30, 31), (40,)]
TIED = {"untied": False, "tied": True}
TEACHERS = "teachers"
KAPPA = 4
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, max_new_tokens=10),
    "sampled": Sampling(n=2, temperature=0.7, max_new_tokens=10, seed=3),
}


def train(student: Student) -> None:
    """Take one large step, on different responses on each rank."""
    rollouts = ragged_rollouts(distributed.rank())
    token_ids_N = torch.cat([rollout.response_ids for rollout in rollouts])
    n = len(token_ids_N)
    tokens = LossTokens(token_ids_N=token_ids_N, adv_N=torch.ones(n), pg_weight_N=torch.full((n,), 1 / n))
    student.update(rollouts, tokens, LossSettings(opd_coef=0.0))


def sample(rollouts: VllmRollout | RemoteRollout) -> dict[str, list[Rollout]]:
    """Sample prompts, of which the ranks have different numbers."""
    mine = range(distributed.rank(), len(PROMPTS), distributed.world_size())
    return {
        name: rollouts.generate([PROMPTS[i] for i in mine], list(mine), sampling)
        for name, sampling in SAMPLINGS.items()
    }


def run(model: PreTrainedModel, rollouts: VllmRollout | RemoteRollout, device: torch.device) -> dict:
    student = Student(model, TrainSettings(learning_rate=2e-2, compute_dtype="float32"), device)
    if isinstance(rollouts, RemoteRollout):
        publish_weights(student, rollouts, 0)
    before = sample(rollouts)
    train(student)
    publish_weights(student, rollouts, 1)
    weights = {name: value.detach().clone() for name, value in student.weights()}
    return {"before": before, "after": sample(rollouts), "weights": weights}


def own_responses(rank: int) -> list[Rollout]:
    return ragged_rollouts(rank, groups=2 + rank)


def save_models(folder: Path) -> None:
    for name, tied in TIED.items():
        tiny_model(seed=0, tied=tied).save_pretrained(folder / name)
        world_tokenizer(toy_world.vocabulary()).save_pretrained(folder / name)


def on_two_ranks(folder: Path, settings: dict[str, Any], urls: tuple[str, ...] = ()) -> list[dict]:
    """Run this file on two ranks and return the results of each."""
    done = on_ranks(2, __file__, str(folder), json.dumps(settings), *urls)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def assert_followed(ranks: list[dict], old: PreTrainedModel, new: PreTrainedModel) -> None:
    """Check that both ranks sampled with the student's weights; `new` takes the trained ones."""
    new.load_state_dict(ranks[0]["weights"])
    for when, model in (("before", old), ("after", new)):
        made = {kind: [r for rank in ranks for r in rank[when][kind]] for kind in SAMPLINGS}
        assert [rollout.group for rollout in made["greedy"]] == [0, 2, 4, 1, 3]
        assert {rollout.policy_version for rollout in made["greedy"]} == {int(when == "after")}
        assert_sampled_by(model, made["greedy"])
        assert_sampled_by(model, made["sampled"], SAMPLINGS["sampled"].temperature, greedy=False)
    assert all(differ(rank["before"]["greedy"], rank["after"]["greedy"]) for rank in ranks)


def main() -> None:
    folder, settings, urls = Path(sys.argv[1]), Vllm.model_validate_json(sys.argv[2]), sys.argv[3:]
    fork_engines()
    with distributed.process_group() as device:
        results = sampled_and_scored(folder, settings, urls, device)
        torch.save(results, folder / f"rank{distributed.rank()}.pt")
        distributed.barrier()


def sampled_and_scored(folder: Path, settings: Vllm, urls: list[str], device: torch.device) -> dict[str, Any]:
    small = {"kv_cache_memory_bytes": 32 << 20, "max_model_len": 64, **settings.engine_kwargs}
    settings = settings.model_copy(update={"engine_kwargs": small})
    shared = settings.tensor_parallel_size > 1  # each takes one model, so that both are covered
    name = "tied" if shared or settings.placement == "process" else "untied"
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    if urls:
        return {name: run(model, RemoteRollout(Servers(urls), [END], 32, model.config.vocab_size), device)}
    results = {name: run(model, VllmRollout(folder / name, [END], settings), device)}
    if settings.placement == "colocated":
        from smopd.engine.vllm.teachers import VllmTeachers  # needs vLLM

        names = TIED if shared else [name]
        teachers = VllmTeachers([folder / name for name in names], settings, VOCABULARY)
        results[TEACHERS] = teachers.score(own_responses(distributed.rank()), KAPPA, 1.0)
    return results


if __name__ == "__main__":
    main()
