"""Write gpt2/ and llama/, small models of transformers, and code.csv, what they are adapted to.

All text ships with Python. The models and their tokenizer are made of docstrings, the public text
here. Clients have the code of other modules: a function or class is a text, a module its owner. So
the tokenizer knows nothing of clients' texts.
"""

import argparse
import ast
import csv
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

TOKENS, LENGTH, WIDTH = 512, 32, 64
STEPS, BATCH, RATE = 300, 16, 3e-3
OWNERS, LEAST, MOST, LONGEST = 150, 5, 20, 800
"""Owners, texts of an owner (at least and at most), and characters of a text."""
END = "<|endoftext|>"


def modules() -> list[Path]:
    """Python's own modules, in the order of their names."""
    library = Path(sysconfig.get_path("stdlib"))
    folders = ("site-packages", "test", "tests", "__pycache__", "idlelib")
    files = (file for file in library.rglob("*.py"))
    return sorted(f for f in files if not {*folders} & {*f.relative_to(library).parts})


def parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return None


def docstrings(files: list[Path]) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    trees = filter(None, map(parsed, files))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))
    return list(filter(None, map(ast.get_docstring, nodes)))


def pieces(file: Path) -> list[str]:
    """Source texts of a module's functions and classes."""
    if (tree := parsed(file)) is None:
        return []
    source = file.read_text(encoding="utf-8")
    kinds = (ast.ClassDef, ast.FunctionDef)
    nodes = (node for node in tree.body if isinstance(node, kinds))
    return [ast.get_source_segment(source, node)[:LONGEST] for node in nodes][:MOST]


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    bytes_pairs = ByteLevelBPETokenizer()
    bytes_pairs.train_from_iterator(
        texts, vocab_size=TOKENS, special_tokens=[END], show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_pairs._tokenizer, eos_token=END, pad_token=END
    )


def untrained(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=TOKENS, n_positions=2 * LENGTH, n_embd=WIDTH, n_layer=2, n_head=4,
                embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, **ends,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2 * LENGTH,
            **ends,
        )
    )  # fmt: skip


def pretrained(kind: str, tokens: torch.Tensor) -> PreTrainedModel:
    """A model trained on random pieces of a text's tokens."""
    model = untrained(kind).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(tokens) - LENGTH - 1, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + LENGTH + 1] for start in starts])
        logits = model(batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{kind}: perplexity {loss.exp():.1f} on its last batch of docstrings")
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    out = parser.parse_args().out
    files = modules()
    public = docstrings(files[::2])
    coder = tokenizer(public)
    tokens = torch.tensor(coder(END.join(public))["input_ids"])
    for kind in ("gpt2", "llama"):
        pretrained(kind, tokens).save_pretrained(out / kind)
        coder.save_pretrained(out / kind)
    library = Path(sysconfig.get_path("stdlib"))
    owners = {str(file.relative_to(library)): pieces(file) for file in files[1::2]}
    chosen = [owner for owner, texts in owners.items() if len(texts) >= LEAST][:OWNERS]
    rows = [(owner, text) for owner in chosen for text in owners[owner]]
    with open(out / "code.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("module", "body"), *rows])
    print(f"code.csv: {len(rows):,} texts of {len(chosen)} modules")


if __name__ == "__main__":
    main()
