"""Makes an oracle of a checkpoint folder: what Transformers answers, greedily, in fp32 (or how far its bf16 is from that).

usage: oracle.py MODEL_DIR --out FILE [--prompts FILE] [--new-tokens 48] [--device cpu|cuda] [--noise FILE]

--prompts: an oracle file whose prompts are asked again (default: tests/oracle/dsv2.json). --noise: also run bf16, teacher-forced on the fp32
answers, and write the differences there. Needs torch and transformers; reads local files only.
"""

import argparse
import json
import os
import pathlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
TOP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--prompts", type=pathlib.Path, default=HERE.parent / "oracle" / "dsv2.json")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--noise", type=pathlib.Path)
    args = parser.parse_args()

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    prompts = [(case["name"], case["prompt"]) for case in json.loads(args.prompts.read_text())["cases"]]
    model = load(args, torch.float32)
    limit = model.config.max_position_embeddings - args.new_tokens
    cases = []
    for name, prompt in prompts:
        ids = tokenizer(prompt).input_ids
        if not 0 < len(ids) <= limit:
            print(f"left out {name}: {len(ids)} ids, context {limit + args.new_tokens}")
            continue
        cases.append(answer(model, tokenizer, name, prompt, ids, args))
        print(name, len(ids), repr(cases[-1]["text"][:60]), flush=True)
    oracle = {
        "model": args.model.name,
        "reference": f"transformers {transformers.__version__} fp32 eager, weights upcast from bf16",
        "new_tokens": args.new_tokens,
        "cases": cases,
    }
    args.out.write_text(json.dumps(oracle))
    if args.noise:
        del model
        args.noise.write_text(json.dumps({args.model.name: noise(load(args, torch.bfloat16), cases, args)}, indent=1))


def load(args, dtype):
    options = {"dtype": dtype, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, **options)
    return model.to(args.device).eval()


@torch.no_grad()
def answer(model, tokenizer, name, prompt, ids, args):
    """Greedy with a cache, EOS not honoured; ties go to the lowest id, as argmax has it."""
    tokens, margins, tops, first = [], [], [], None
    cache, step = None, torch.tensor([ids], device=args.device)
    for _ in range(args.new_tokens):
        out = model(step, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1].float()
        logprobs = torch.log_softmax(logits, -1)
        best = torch.topk(logits, 2).values
        token = int(logits.argmax())
        first = logits if first is None else first
        tokens.append(token)
        margins.append(float(best[0] - best[1]))
        top = torch.topk(logprobs, TOP)
        tops.append([[int(i), float(v)] for v, i in zip(top.values, top.indices)])
        step = torch.tensor([[token]], device=args.device)
    return {
        "name": name,
        "prompt": prompt,
        "prompt_ids": ids,
        "tokens": tokens,
        "text": tokenizer.decode(tokens),
        "margin": margins,
        "top5_logprobs": tops,
        "first_logits": [float(v) for v in first] if len(ids) < 16 else None,
    }


@torch.no_grad()
def noise(model, cases, args):
    """|Δlogprob| of the fp32 answer's tokens and flips of the argmax, in one pass a case."""
    moved, flips, largest = [], 0, 0.0
    for case in cases:
        ids = torch.tensor([case["prompt_ids"] + case["tokens"][:-1]], device=args.device)
        logits = model(ids).logits[0, len(case["prompt_ids"]) - 1 :].float()
        logprobs = torch.log_softmax(logits, -1)
        for at, token in enumerate(case["tokens"]):
            moved.append(abs(float(logprobs[at, token]) - case["top5_logprobs"][at][0][1]))
            if int(logits[at].argmax()) != token:
                flips += 1
                largest = max(largest, case["margin"][at])
    moved.sort()
    return {
        "positions": len(moved),
        "chosen_logprob_abs_diff": {
            "mean": sum(moved) / len(moved),
            "p50": moved[len(moved) // 2],
            "p99": moved[min(len(moved) - 1, int(0.99 * len(moved)))],
            "max": moved[-1],
        },
        "argmax_flips": flips,
        "largest_fp32_margin_flipped": largest,
    }


if __name__ == "__main__":
    main()
