"""The words of docs/accuracy.md, and the figures of other estimators that it quotes."""

__all__ = [
    "AGAINST",
    "FOREIGN",
    "INTERVALS",
    "INTRODUCTION",
    "KNOWN",
    "OOM",
    "OOM_REASONS",
    "OWN_STEP",
    "PEERS_NOTE",
    "PUBLISHED",
    "REASONS",
    "UNTOUCHED",
    "VERDICT",
]

INTRODUCTION = """# Accuracy

How far predictions are from what was measured: {rows} published measurements and {own} of foretune's own step
([observations](observations.md)). `foretune score` predicts them, with either engine; this page is made from what both
said of them (`docs/predictions/`, written by `scripts/predictions.py`; estimator version {version}; the trace with
{libraries}), and `tests/evidence/test_accuracy.py` holds the figures.

All errors are absolute and in percent of what was measured. p90: nine in ten rows are at most so far off. No number of
the program was fitted to a row's figures, but for the context of a T4, the same on all its rows, and of an H200: there
the process is reserved and a constant taken from these rows. The rules were found with the published rows in view, and
some since then with the run on the H200 in view; what had been traced before any of that run was known stands below as
*blind*.
"""

PUBLISHED: dict[str, tuple[str, str]] = {
    "refused": ("38 %", "38 %"),
    "allocated, exact settings": ("8.9 / 56.9 (59)", "0.5 / 60.6 (59)"),
    "allocated, nearest settings": ("52.3 / 380 (52)", "32.8 / 367 (52)"),
    "reserved, exact settings": ("20.0 / 110.9", "2.8 / 28.2"),
    "process, T4": ("29.0 / 146.9 (44)", "2.3 / 15.3 (44)"),
}
"""canifinetune 0.4.1 and fitcheck-llm 0.3.1 on the public rows: sums of components for allocated, their totals without
safety margin for reserved and process."""

PEERS_NOTE = """Over the {rows} public rows with one GPU, full, lora or qlora, grade A or B and a known length;
*refused* is the share of these. *Exact* and *nearest* are each program's own: of a foretune engine the rows above whose
stack is known, and those whose stack is foreign, so these lines are over different rows. The process on a T4 is over
the same 44 rows for all; fitcheck was fitted on 27 of them, and foretune's constant for the context comes from all of
them. The others' figures were published with the rows: allocated is their sum of components, reserved and process their
totals without safety margin."""

REASONS = {
    "manual-loop-5.0": "Transformers 5.0 quantizes on four threads: reserved differs from run to run",
    "gpt_bigcode": "up to Transformers 4.48 its class keeps a cache under checkpointing: modelled; 0.9 % is left",
}
"""Why rows of a stack or of a model type are missed."""

KNOWN = """Both engines follow the loops of these stacks: autocast, reentrant checkpointing, flash-attn and fused
kernels, which fms-acceleration's rows have, and litgpt's own model code, which only the estimate has. A dash: the
engine has no program for the row."""

OWN_STEP = """The first run of `benchmarks/gpu_truth.py` (torch 2.11, Transformers 5.17, PEFT 0.21, bitsandbytes 0.50),
two updates of 2 x 1,024 tokens each. Measured bytes, and by how many bytes a prediction is off. *Blind*: traced in the
same run on these libraries, before any rule had been changed by a measurement of this step. *Traced* and *estimated*:
today's, where the contract has words for the configuration. Outside the allocator the device held {least:.1f} to
{most:.1f} MiB, the more where cuDNN's attention ran."""

FOREIGN = """No profile describes these rows: their loop, a version, a kernel or a setting is another, and the nearest
is predicted. `foretune score --rows` says of each what differs."""

INTERVALS = """Each answer has intervals in which the truth lies with 90 % ([memory](memory.md), *Intervals and
verdicts*). *Range*: of the class, learnt on all its rows. *Covered, left out*: share of a source's rows that lie in
what was learnt without any row of the same source and model. *Score*: Gneiting and Raftery's interval score on these
rows, in percent of the prediction; it adds up the width and twenty times each miss, and less is better; beside it that
of a fixed interval of 5 % to both sides."""

VERDICT = """## Verdicts

What the estimate says of runs whose card is known: *fits* where the upper end of the process' interval is within it,
*does not fit* where the lower end is not, *tight* between.
"""

OOM = """Runs that ran out of memory although the estimate says *fits*, each with what is known of it."""

OOM_REASONS: dict[str, str] = {}
"""By row, after it was examined."""

AGAINST = """## Against the program

**Against the program itself.** The real Transformers and PEFT code, run on tensors without data, and the estimate are
compared event by event: 317 configurations of thirteen families in many ways to train (`tests/golden/traces.jsonl`),
and every family that is estimated and that Transformers has, at its real width with few layers, trained in full, under
LoRA and under QLoRA, with one sequence and two (`tests/golden/families.jsonl`):

{families}

Those figures say that the estimate is the program; the tables above say that the program is what a GPU runs. Not so
compared are Qwen 1, Baichuan and ChatGLM, whose code is published with their checkpoints: written from what is known of
it, no program was at hand to hold them against, and their answers count as those of a foreign stack.

**Against torch's own profiler.** The runtime's step on real tensors on a CPU, in 41 configurations of twelve families
(dense, experts, state space, hybrid; full, LoRA, DoRA and modules trained whole; stock and chunked loss; with and
without checkpointing and accumulation), peaks within 0.003 % of the trace under a CPU's rules, the order of all births
and deaths the same (`tests/runtime/test_cpu_truth.py`).

**Against real processes on a CPU.** With `device: cpu` the trace also says what the process grows by. 25 runs in
processes of their own (`python benchmarks/cpu_growth.py` has most of them: random models of 49M to 166M parameters,
checkpoints in fp32 and bf16, LoRA and full, AdamW and SGD, stock and chunked loss, with and without checkpointing and
accumulation, sdpa and eager; four updates, one thread, glibc 2.36) grew by 5.5 % less to 7.6 % more than that, and one
of twenty updates by 12.7 % more, because the heap goes on breaking into pieces. The tensors alone would be up to 60 %
too low.

**Against a real GPU.** `python benchmarks/gpu_truth.py --out DIR` runs foretune's own training step on the GPU of this
machine: thirteen short configurations at published widths with two or four layers, random weights, two updates each,
every one in a process of its own. Beside each it traces the same configuration for the libraries and the device it
finds, and compares what was measured with what was traced: allocated and reserved peaks over all and by phase, and the
allocator's events one by one. The measured events are also replayed through the model of the allocator, so that a wrong
event and a wrong allocator can be told apart. `scripts/gpu_observations.py` turns its results into observations.

The first run showed where the programs differed from the device although the peaks agreed: cuDNN's attention, partial
sums of long reductions, the order of dropout's results, adapters made in the base's dtype. These became rules, each
with its source. Since then the *estimate*, which runs no torch, has the same allocations and frees as the H200's own
history in all twelve configurations that a setting describes, from loading to the second update, 52,000 events, each of
the same size and in the same order (`tests/memory/test_h200.py`).
"""

UNTOUCHED = """## What no measurement has touched

The H200 was the first to touch bf16 eager attention, the fused optimizer, the chunked loss, torch's math attention in a
new version, compute capability 9.0, and, traced with the measuring script's help, padded rows and expandable segments:
in one run, on dense models of three families (Llama, Qwen2, Gemma 2) with two or four layers. Not touched on a GPU are
compute capability 10.0 and later; experts, state space and hybrid models; an 8-bit base, DoRA on a quantized base and
modules trained whole; and foretune's own step with an 8-bit optimizer or at full depth. No row is of the stack
profiles {profiles} (foretune's own was measured on the libraries before its own). What an answer rests on without a
measurement it names.
"""
