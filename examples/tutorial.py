# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Tutorial
#
# This page trains two teachers and one student on two rewards, in about five minutes on two cores.
# `make tutorial` runs the page as a notebook. You need a clone, and `pip install '.[train,study]'`.

# %%
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from smopd import ops

SMALL = (
    "--loop.steps 1 --runs.smopd.set.loop.steps 1 --runs.smopd_paper.set.loop.steps 1 "
    "--runs.accuracy_teacher.set.loop.steps 1 --runs.format_teacher.set.loop.steps 1 "
    "--loop.prompts_per_step 4 --warm_start.steps 2 --warm_start.source.kwargs.n 128 "
    "--data.train.kwargs.n 16 --data.evaluation.kwargs.n 4 --evaluation.samples 0 "
    "--runs.smopd.set.merge.guard.prompts 1 --log.token_views 1 --processes 1"
)
SHORT = ["--loop.steps", "60"]  # runs without teachers
SPEED = SMALL.split() if os.environ.get("SMOPD_TUTORIAL") == "small" else SHORT  # small: for the tests
torch.manual_seed(0)

# %% [markdown]
# ## Who decides the gradient?
#
# GDPO normalizes each reward within a group of responses. If all responses of a group earn the same, the
# reward adds nothing to their advantages. So a rarely earned reward has little influence, whatever its
# weight. The plot shows its share of the advantages against the share of responses that earn it.

# %%
rates = [0.5, 0.1, 0.03, 0.01, 0.003, 0.001]
groups_R = torch.arange(512).repeat_interleave(8)
shares = []
for rate in rates:
    rewards_RK = torch.stack([torch.rand(4096) * 6 - 3, (torch.rand(4096) < rate).float()], 1)
    parts = [ops.gdpo_advantages(rewards_RK, groups_R, weights_K=w, whiten=None) for w in torch.eye(2)]
    dense, sparse = (part.abs().sum() for part in parts)
    shares.append(float(sparse / (dense + sparse)))

plt.figure(figsize=(5, 3))
plt.semilogx(rates, shares, "o-", color="tab:orange")
plt.xlabel("share of responses that earn the sparse reward")
plt.ylabel("its share of the advantages")
plt.ylim(0, 0.6)
plt.show()

# %% [markdown]
# ## Train
#
# The next cell trains two runs without teachers, one teacher per reward, and both kinds of merge. The
# prompts, the rewards and a tiny model come from the quickstart's recipe.


# %%
def train(*words: str) -> None:
    """Run `smopd train quickstart` with these options."""
    command = [sys.executable, "-m", "smopd.train", "quickstart", *words, *SPEED]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


runs = ["gdpo", "batch_balanced", "accuracy_teacher", "format_teacher", "smopd_paper", "smopd"]
out = Path("runs/tutorial")
train("--output", str(out), "--only", *runs)
json.loads((out / "results.json").read_text())

# %% [markdown]
# ## Both rewards at once
#
# Each teacher moves along one axis. The published student (`smopd_paper`) ends between the teachers. The
# merge of weights (`smopd`) starts with the gains of both. `runs/tutorial/report.html` also has this plot.


# %%
def rewards(run: Path) -> list[tuple[float, float]]:
    """Return (accuracy, format) of each step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        (line["reward/accuracy/mean"], line["reward/format/mean"]) for line in lines if "grad_norm" in line
    ]


plt.figure(figsize=(5, 4))
for run in runs:
    plt.plot(*zip(*rewards(out / run), strict=True), label=run, linewidth=1)
    plt.plot(*rewards(out / run)[-1], "ko", markersize=4)
plt.xlabel("accuracy (-3 to 3)")
plt.ylabel("exact format (0 or 1)")
plt.legend()
plt.show()

# %% [markdown]
# ## Which teacher wanted each token?
#
# For every token, `tokens.jsonl` has each teacher's log-ratio to the mean of the teachers. The next cell
# prints the tokens that the format teacher favors.

# %%
view = json.loads((out / "smopd" / "tokens.jsonl").read_text().splitlines()[-1])
print("".join(token["text"] for token in view["tokens"]))
for token in view["tokens"]:
    ratio = dict(zip(view["teachers"], token["log_ratios"], strict=True))["format_teacher"]
    if ratio is not None and ratio > 0.2:
        print(f"{ratio:+.2f}  {token['text']!r}  student {token['p']:.2f}")

# %% [markdown]
# ## Change one weight
#
# Train a format teacher with a larger weight on accuracy.

# %%
heavier = Path("runs/tutorial_weights")
shutil.copytree(out / "base", heavier / "base", dirs_exist_ok=True)  # the same start
train(
    "--output", str(heavier), "--only", "format_teacher", "--runs.format_teacher.reward_weights", "0.3", "0.7"
)
for folder in (out, heavier):
    print(folder, rewards(folder / "format_teacher")[-1])

# %% [markdown]
# ## Your own reward
#
# A reward is a function of texts that returns one number for each text. Try it on rows before you train.


# %%
def brevity(prompts, completions, *, limit=200, **columns):
    return [1.0 - min(len(text), limit) / limit for text in completions]


rows = [json.loads(line) for line in (out / "smopd" / "responses.jsonl").read_text().splitlines()[:20]]
brevity([row["prompt"] for row in rows], [row["response"] for row in rows])

# %% [markdown]
# In a recipe, write `- {name: brevity, function: "my_rewards:brevity", weight: 0.2, range: [0, 1]}`.
#
# ## The fused loss against eager PyTorch
#
# `topk_forward_kl` reads the logits once and needs no log-softmax of the whole vocabulary.

# %%
N, V, kappa = 64, 32_000, 16
logits_NV = torch.randn(N, V)
token_ids_N = torch.randint(V, (N,))
target_logps_NS, target_ids_NS = torch.randn(N, V).log_softmax(-1).topk(kappa)


def eager() -> torch.Tensor:
    logps_NV = logits_NV.log_softmax(-1)
    return (target_logps_NS.exp() * (target_logps_NS - logps_NV.gather(-1, target_ids_NS))).sum(-1)


def fused() -> torch.Tensor:
    return ops.topk_forward_kl(logits_NV, token_ids_N, target_ids_NS.int(), target_logps_NS)[1]


torch.testing.assert_close(fused(), eager())
for function in (eager, fused):
    begin = time.perf_counter()
    for _ in range(20):
        function()
    print(f"{function.__name__}: {(time.perf_counter() - begin) / 20 * 1e3:.2f} ms")
