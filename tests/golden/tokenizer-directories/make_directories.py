#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes random directories of tokenizers, and the ids that AutoTokenizer of transformers 4 and 5 gives for texts.

    make_directories.py PYTHON4 PYTHON5        writes the files .jsonl beside this file

PYTHON4 has transformers 4.57.6, PYTHON5 5.24.0, both tokenizers, sentencepiece, protobuf and jinja2. A line is one
directory:
    kind    the model, and the files that hold it
    files   by name the content: a number refers to "content" in the first line, which has the large files (as text, or
            as {"base64": ..}), other files are JSON
    texts   the texts
    fast4, slow4, auto5   for each text its ids, or the error that the reference raised
    special what fast4 and auto5 say of special tokens: bos, eos, the ids that they put before and after a text
named.jsonl has directories written out below, one for each rule; random.jsonl and unigram.jsonl have random ones, which
depend on the seed alone.
"""
import base64
import json
import os
import random
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
NUM_RANDOM, NUM_UNIGRAM = 420, 150

CORPUS = ["the cat sat on the mat and the hat", "a big red tree and a big red fish swim", "new words are newer than old words",
          "The Cat Says Hello World", "one two three 123 45 6", "hello hello world worlds", "caf\u00e9 na\u00efve \u00fcber",
          "x = y + z;", "user says no, the user says yes."]

# ---- the large files -------------------------------------------------------------------------------------------------


def base_files(folder):
    """By name: text, or bytes."""
    import sentencepiece
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = {}

    def bpe(name, pre, normalizer=None, size=330):
        t = Tokenizer(models.BPE())
        t.pre_tokenizer = pre
        if normalizer:
            t.normalizer = normalizer
        t.decoder = decoders.ByteLevel()
        t.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
        made[name] = t.to_str()

    bpe("gpt2", pre_tokenizers.ByteLevel(add_prefix_space=False))
    bpe("gpt2-prefix", pre_tokenizers.ByteLevel(add_prefix_space=True))
    qwen = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+")
    bpe("qwen2", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(qwen), "isolated"), pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False)]), normalizers.NFC())

    for cased in (False, True):
        t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        t.normalizer = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=None,
                                                  lowercase=not cased)
        t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        t.decoder = decoders.WordPiece(prefix="##")
        texts = CORPUS + ["Hello hello World world Big big Caf\u00e9 cafe"] * 5
        t.train_from_iterator(texts * 3, trainers.WordPieceTrainer(
            vocab_size=190, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False))
        made["bert-cased" if cased else "bert-uncased"] = t.to_str()

    def spm(name, **options):
        path = os.path.join(folder, name)
        with open(path + ".txt", "w", encoding="utf-8") as f:
            f.write("\n".join(CORPUS * 3))
        sentencepiece.SentencePieceTrainer.train(
            **{**dict(input=path + ".txt", model_prefix=path, vocab_size=340, num_threads=1, minloglevel=2,
                      normalization_rule_name="identity", remove_extra_whitespaces=False, model_type="bpe",
                      byte_fallback=True, character_coverage=1.0, allow_whitespace_only_pieces=True), **options})
        with open(path + ".model", "rb") as f:
            made[name] = f.read()

    spm("spm-bpe")
    spm("spm-user", user_defined_symbols=["<sep>", "newer"])
    spm("spm-nmt", normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    spm("spm-unigram", model_type="unigram", vocab_size=360, hard_vocab_limit=False)

    sp = sentencepiece.SentencePieceProcessor(model_proto=made["spm-bpe"])
    vocab = {sp.id_to_piece(i): i for i in range(sp.get_piece_size())}
    merges = []
    for piece, i in vocab.items():
        if not (sp.is_byte(i) or sp.is_control(i) or sp.is_unknown(i)):
            merges += [(i, vocab[piece[:k]], vocab[piece[k:]], piece[:k], piece[k:]) for k in range(1, len(piece))
                       if piece[:k] in vocab and piece[k:] in vocab]
    merges = [(a, b) for _, _, _, a, b in sorted(merges)]
    for name in ("llama", "llama-first"):
        t = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        if name == "llama":
            t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        else:
            t.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
        t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
        made[name] = t.to_str()
    t = Tokenizer(models.Unigram([(sp.id_to_piece(i), -float(i)) for i in range(sp.get_piece_size())], unk_id=0))
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    made["unigram"] = t.to_str()
    unigrams(made, spm, sentencepiece)
    made["pieces"] = {}
    for name in ("spm-bpe", "spm-user", "spm-nmt", "spm-unigram"):
        sp = sentencepiece.SentencePieceProcessor(model_proto=made[name])
        made["pieces"][name] = {sp.id_to_piece(i): i for i in range(sp.get_piece_size())}
    return made


# Rules for characters: hexadecimal code points, and what they become. Few of them, so that the files stay small.
RULES = ["FB01\t66 69", "AA\t61", "FF28\t48", "A0\t20", "3000\t20", "A\t20", "9\t20", "D\t20", "65 301\tE9", "200B\t",
         "2026\t2E 2E 2E", "C4\t41 65"]


def unigrams(made, spm, sentencepiece):
    import tempfile as files

    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    with files.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.write("\n".join(RULES) + "\n")
        rules.flush()
        spm("spm-rules", model_type="unigram", vocab_size=300, hard_vocab_limit=False, byte_fallback=False,
            normalization_rule_tsv=rules.name)
    model = sentencepiece_model_pb2.ModelProto.FromString(made.pop("spm-rules"))
    pieces = [(p.piece, round(p.score, 4)) for p in model.pieces if p.type == 1]
    charsmap = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
    blanks = normalizers.Replace(Regex(" {2,}"), " ")
    mark = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), mark])

    def unigram(name, before, after, unk, normalizer, pre, post=None, byte_fallback=False):
        vocab = [(t, 0.0) for t in before] + pieces + [(t, 0.0) for t in after]
        t = Tokenizer(models.Unigram(vocab, unk_id=unk, byte_fallback=byte_fallback))
        t.normalizer, t.pre_tokenizer = normalizer, pre
        t.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="always")
        if post:
            ids = {name: i for i, (name, _) in enumerate(vocab)}
            t.post_processor = processors.TemplateProcessing(
                single=post, special_tokens=[(x, ids[x]) for x in post.split() if x != "$A"])
        made[name] = t.to_str()

    t5 = ["<pad>", "</s>", "<unk>"]
    unigram("t5", t5, [], 2, charsmap, words, "$A </s>")
    unigram("t5-first", t5, [], 2, normalizers.Sequence([charsmap, blanks]),
            pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first"))
    unigram("xlm-roberta", ["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"], 3, normalizers.Sequence([charsmap, blanks]), mark,
            "<s> $A </s>")
    unigram("albert", ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"], [], 1, normalizers.Sequence(
        [normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD(), normalizers.StripAccents(),
         normalizers.Lowercase(), charsmap, blanks]), mark, "[CLS] $A [SEP]")
    unigram("unigram-bytes", ["<unk>", "<s>", "</s>"], ["<0x%02X>" % b for b in range(256)], 0, charsmap,
            pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="never", split=False), byte_fallback=True)
    unigram("unigram-some-bytes", ["<unk>", "<s>", "</s>"], ["<0x%02X>" % b for b in range(128)], 0, None, None,
            byte_fallback=True)


# ---- a random directory ----------------------------------------------------------------------------------------------

KINDS = {  # kind: (base, files that hold the model, classes)
    "json gpt2": ("gpt2", "json", ["GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast"]),
    "json gpt2 with a blank": ("gpt2-prefix", "json", ["GPT2Tokenizer", "PreTrainedTokenizerFast"]),
    "json qwen2": ("qwen2", "json", ["Qwen2Tokenizer", "PreTrainedTokenizerFast"]),
    "json llama": ("llama", "json", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"]),
    "json llama first": ("llama-first", "json", ["LlamaTokenizer", "PreTrainedTokenizerFast"]),
    "json bert": ("bert-uncased", "json", ["BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast"]),
    "json bert cased": ("bert-cased", "json", ["BertTokenizer", "DistilBertTokenizer", "PreTrainedTokenizerFast"]),
    "json unigram": ("unigram", "json", ["PreTrainedTokenizerFast", "T5Tokenizer"]),
    "merges gpt2": ("gpt2", "merges", ["GPT2Tokenizer"]),
    "merges qwen2": ("gpt2", "merges", ["Qwen2Tokenizer"]),
    "merges roberta": ("gpt2", "merges", ["RobertaTokenizer"]),
    "vocab bert": ("bert-cased", "vocab", ["BertTokenizer", "BertTokenizerFast", "ElectraTokenizer"]),
    "spm": ("spm-bpe", "spm", ["LlamaTokenizer", "LlamaTokenizer", "LlamaTokenizerFast"]),
    "spm user": ("spm-user", "spm", ["LlamaTokenizer"]),
    "spm nmt": ("spm-nmt", "spm", ["LlamaTokenizer"]),
    "spm unigram": ("spm-unigram", "spm", ["LlamaTokenizer"]),
    "spm and json": ("llama", "json+spm", ["LlamaTokenizer"]),
}
UNIGRAM_KINDS = {
    "json t5": ("t5", "json", ["T5Tokenizer", "T5TokenizerFast", "PreTrainedTokenizerFast"]),
    "json t5 first": ("t5-first", "json", ["PreTrainedTokenizerFast", "T5Tokenizer"]),
    "json xlm-roberta": ("xlm-roberta", "json", ["XLMRobertaTokenizer", "XLMRobertaTokenizerFast", "PreTrainedTokenizerFast"]),
    "json albert": ("albert", "json", ["AlbertTokenizer", "AlbertTokenizerFast", "PreTrainedTokenizerFast"]),
    "json unigram bytes": ("unigram-bytes", "json", ["PreTrainedTokenizerFast", "LlamaTokenizer"]),
    "json unigram some bytes": ("unigram-some-bytes", "json", ["PreTrainedTokenizerFast"]),
}
MODEL_TYPES = {"T5Tokenizer": "t5", "XLMRobertaTokenizer": "xlm-roberta", "AlbertTokenizer": "albert",
               "GPT2Tokenizer": "gpt2", "Qwen2Tokenizer": "qwen2", "LlamaTokenizer": "llama", "BertTokenizer": "bert",
               "RobertaTokenizer": "roberta"}
CONTENTS = ["<|im_start|>", "<|im_end|>", "<extra>", "newword", "[TOOL]", "Hello", " big", "<s>", "</s>", "<unk>",
            "<|endoftext|>", "[MASK]", "caf\u00e9", "the"]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def choose(r, *weighted):
    total = r.uniform(0, sum(w for w, _ in weighted))
    for weight, value in weighted:
        total -= weight
        if total <= 0:
            return value
    return weighted[-1][1]


def token(r, content, plain=0.4):
    special = r.random() < 0.6
    if r.random() < plain:
        return dict(content=content, single_word=False, lstrip=False, rstrip=False, normalized=not special, special=special)
    return dict(content=content, **{f: r.random() < 0.4 for f in FLAGS})


def directory(r, kind, bases):
    base, held, classes = {**KINDS, **UNIGRAM_KINDS}[kind]
    files = {}
    model = json.loads(bases[base]) if isinstance(bases[base], str) else None
    vocab = {}
    if model and isinstance(model["model"]["vocab"], dict):
        vocab = model["model"]["vocab"]
    elif model:
        vocab = {v[0]: i for i, v in enumerate(model["model"]["vocab"])}
    if "spm" in held:
        files["tokenizer.model"] = "spm-bpe" if held == "json+spm" else base
    if "spm" in held and not vocab:
        vocab = bases["pieces"][base]
    num_vocab = len(vocab)
    cls = r.choice(classes)
    bare = cls[:-4] if cls.endswith("Fast") else cls

    added = []  # of tokenizer.json, as the library numbers them
    contents = r.sample(CONTENTS, r.randint(0, 5))
    next_id = num_vocab
    if held in ("json", "json+spm"):
        if bare == "LlamaTokenizer" or base.startswith("llama"):
            added += [dict(token(r, c, plain=1), special=True, normalized=False, id=i) for i, c in enumerate(["<unk>", "<s>", "</s>"])
                      if r.random() < 0.9]
        if base.startswith("bert"):
            added += [dict(token(r, c, plain=1), special=True, normalized=False, id=i)
                      for i, c in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])]
        for c in contents:
            if c in [a["content"] for a in added] or r.random() < 0.3:
                continue
            t = token(r, c)
            if c in vocab:
                t["id"] = vocab[c]
            else:
                t["id"], next_id = next_id, next_id + 1
            added.append(t)
        model["added_tokens"] = added = sorted(added, key=lambda a: a["id"])
        if model.get("post_processor") is None and "<s>" in vocab and r.random() < 0.5:
            model["post_processor"] = {"type": "TemplateProcessing", "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [
                {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab["<s>"]], "tokens": ["<s>"]}}}
        files["tokenizer.json"] = model
    if held == "merges":
        files["vocab.json"], files["merges.txt"] = "vocab.json", "merges.txt"
    if held == "vocab":
        files["vocab.txt"] = "vocab.txt"

    config = {}
    how = choose(r, (0.72, "config"), (0.18, "type"), (0.10, "class in config.json"))
    if how == "config":
        config["tokenizer_class"] = cls
    elif how == "class in config.json":
        files["config.json"] = {"model_type": "llama", "tokenizer_class": cls, "eos_token_id": 2}
    else:
        files["config.json"] = {"model_type": MODEL_TYPES.get(bare, "gpt2")}

    def ids_of(c):
        for a in added:
            if a["content"] == c:
                return a["id"]
        return vocab.get(c)

    decoder = {}
    state = choose(r, (0.35, "none"), (0.2, "same"), (0.25, "flags"), (0.2, "more"))
    if held in ("merges", "vocab", "spm") and state in ("same", "flags"):
        state = "more"
    if state != "none":
        for a in added:
            t = dict(a)
            i = t.pop("id")
            if state != "same" and r.random() < 0.3:
                t = token(r, t["content"])
            decoder[str(i)] = t
        if held in ("merges", "vocab", "spm"):
            for c in ["<unk>", "<s>", "</s>", "[UNK]", "[CLS]", "<|endoftext|>"]:
                if ids_of(c) is not None and r.random() < 0.8:
                    decoder[str(ids_of(c))] = dict(token(r, c, plain=0.8), special=True)
        if state == "more":
            for c in contents + r.sample(CONTENTS, 2):
                if c in [d["content"] for d in decoder.values()]:
                    continue
                i = ids_of(c)
                if i is None:
                    i, next_id = next_id, next_id + 1
                    if r.random() < 0.05:
                        i += 3
                decoder[str(i)] = token(r, c)
        config["added_tokens_decoder"] = decoder
    known = [d["content"] for d in decoder.values()] + [a["content"] for a in added]
    defaults = {"BertTokenizer": {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
                                  "mask_token": "[MASK]"}}.get(bare, {})
    names = ["bos_token", "eos_token", "pad_token"] if not defaults else ["mask_token", "eos_token"]

    def special_tokens(likely):
        found = dict(defaults) if r.random() < 0.5 else {}
        for name in names:
            if r.random() > likely:
                continue
            c = r.choice(known) if known and r.random() < 0.8 else r.choice(["</s>", "<|im_end|>", "<new>"])
            if " " in c:  # transformers 4 cannot make its template of it
                continue
            found[name] = c if r.random() < 0.7 else dict(token(r, c, plain=0.5))
        for t in found.values():
            if isinstance(t, dict):
                t.pop("special", None)
        return found

    for name, t in special_tokens(0.5).items():
        config[name] = dict(t, __type="AddedToken") if isinstance(t, dict) else t
    if r.random() < 0.4:
        files["special_tokens_map.json"] = special_tokens(0.6)
        if r.random() < 0.3:
            files["special_tokens_map.json"]["additional_special_tokens"] = r.sample(CONTENTS[:5], 2)
    if r.random() < 0.3:
        more = {}
        for c in r.sample(CONTENTS[:5], r.randint(1, 2)):
            i = ids_of(c)
            if i is None:
                i = next((int(k) for k, d in decoder.items() if d["content"] == c), None)
            if i is None:
                i, next_id = next_id, next_id + 1
            more[c] = i
        files["added_tokens.json"] = more
    if r.random() < 0.15:
        config["additional_special_tokens"] = r.sample(CONTENTS[:5], 2)

    def maybe(p, key, *values):
        if r.random() < p:
            config[key] = r.choice(values)

    if base.startswith("bert"):
        maybe(0.6, "do_lower_case", True, False)
        maybe(0.2, "strip_accents", True, False, None)
        maybe(0.2, "tokenize_chinese_chars", True, False)
    if base in ("gpt2", "gpt2-prefix", "qwen2"):
        maybe(0.35, "add_prefix_space", True, False)
    if base.startswith(("llama", "spm")):
        maybe(0.7, "legacy", True, False, False)
        maybe(0.2, "add_prefix_space", True, False, None)
        maybe(0.4, "add_bos_token", True, False)
        maybe(0.3, "add_eos_token", True, False)
    if base == "t5":
        maybe(0.7, "extra_ids", 0, 3)
    if base == "albert":
        maybe(0.4, "do_lower_case", True, False)
        maybe(0.3, "keep_accents", True, False)
    if base in ("xlm-roberta", "albert", "unigram-bytes"):
        maybe(0.2, "add_prefix_space", True, False)
    maybe(0.1, "split_special_tokens", True, False)
    maybe(0.3, "clean_up_tokenization_spaces", True, False)
    maybe(0.3, "model_max_length", 64, 10**30)
    maybe(0.2, "padding_side", "left", "right")
    if config or how == "config":
        files["tokenizer_config.json"] = config
    return files


UNUSUAL = ["\ufb01ne", "\u00aa\u0301b", "\uff28ello", "cafe\u0301", "a\u200bb", "\u200b", "``x''", "\u2026", "\u00c4\u0301",
           "\u00aa\ufe0f", "\u0600\u00aa", "\u4f60\u597d<0x41>"]


def texts_of(r, files, more=()):
    words = ["Hello", "hello", "the cat", "newword", "newwords", "big", " big red", "caf\u00e9", "CAF\u00c9", "\u4e2d\u6587",
             "worlds", "123", "x;", "\u2581", "<0x41>", ".", "\u00fcber", *more]
    tokens = list(CONTENTS)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        f = files.get(name)
        if isinstance(f, dict):
            tokens += [t["content"] for t in f.get("added_tokens", [])]
            tokens += [t["content"] for t in f.get("added_tokens_decoder", {}).values()] * 2
            tokens += [t if isinstance(t, str) else t["content"] for k, t in f.items() if k.endswith("_token") and
                       isinstance(t, (str, dict))] * 2
    gaps = ["", "", " ", " ", "  ", "\n", "\t ", "\u00a0"]
    texts = ["Hello world", " the  cat\nsat ", "Caf\u00e9 \u00dcBER big"]
    for _ in range(9):
        text = r.choice(gaps)
        for _ in range(r.randint(2, 6)):
            text += (r.choice(tokens) if r.random() < 0.5 else r.choice(words)) + r.choice(gaps)
        texts.append(text)
    return texts


# ---- directories that show a rule each --------------------------------------------------------------------------------


def flags(content, *of, special=True):
    return dict(content=content, special=special, **{f: f in of for f in FLAGS if f != "special"})


def numbered(first, *tokens):
    return {str(first + i): t for i, t in enumerate(tokens)}


def named(bases):
    spm = lambda **config: {"tokenizer.model": "spm-bpe", "tokenizer_config.json": dict(
        tokenizer_class="LlamaTokenizer", **{"legacy": False, **config})}
    special = {"0": flags("<unk>"), "1": flags("<s>"), "2": flags("</s>")}
    chat = numbered(340, flags("<|im_start|>"), flags("<|im_end|>"))
    im = ["<|im_start|>user says<|im_end|>one two", "one two three</s>big tree</s>red fish", "<s> <unk>x</s>"]

    def of(base, tokens=(), **config):
        model = json.loads(bases[base])
        model["added_tokens"] = [dict(t, id=int(i)) for i, t in dict(tokens).items()]
        return {"tokenizer.json": model, **({"tokenizer_config.json": config} if config else {})}

    bert = {str(i): flags(c) for i, c in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])}
    cased = ["Hello big World Caf\u00e9", "HELLO [MASK] hello", "\u4e2d\u6587 caf\u00e9"]
    blank = ["Hello world", " Hello", "<|im_end|> Hello", "x"]
    strip = ["a <x> b", "a<x>b", "a  <x>  b", "\t<x>\n<x> ", "x <x><x> x", "a<x>"]
    merges = lambda cls, **config: {"vocab.json": "vocab.json", "merges.txt": "merges.txt", "tokenizer_config.json": dict(
        tokenizer_class=cls, **config)}
    vocab = lambda **config: {"vocab.txt": "vocab.txt", "tokenizer_config.json": dict(
        tokenizer_class="BertTokenizer", **config)}
    cases = [
        ("a text spells out the control tokens of tokenizer.model", spm(), im),
        ("added_tokens_decoder adds to tokenizer.model", spm(added_tokens_decoder={**special, **chat}), im),
        ("added_tokens.json adds to tokenizer.model",
         dict(spm(), **{"added_tokens.json": {"<|im_start|>": 340, "<|im_end|>": 341}}), im),
        ("eos_token adds to tokenizer.model", spm(eos_token="<|im_end|>"), im),
        ("special_tokens_map.json adds to tokenizer.model",
         dict(spm(eos_token="</s>"), **{"special_tokens_map.json": {"eos_token": "<|im_end|>"}}), im),
        ("special_tokens_map.json does not count beside added_tokens_decoder",
         dict(spm(added_tokens_decoder={**special, **chat}, eos_token="</s>"),
              **{"special_tokens_map.json": {"eos_token": "<|im_end|>", "pad_token": "two"}}), im),
        ("added_tokens.json does not count beside added_tokens_decoder",
         dict(spm(added_tokens_decoder=special), **{"added_tokens.json": {"<|im_start|>": 340}}), im),
        ("tokenizer.model without a class, but with config.json", {"tokenizer.model": "spm-bpe", "config.json": {
            "model_type": "llama"}, "tokenizer_config.json": {"legacy": False}}, im),
        ("tokenizer.model, legacy, versions differ", spm(legacy=True, added_tokens_decoder={**special, **chat}), im),
        ("tokenizer.model, legacy, for a model that transformers 5 reads without a class",
         dict(spm(legacy=True, added_tokens_decoder={**special, **chat}), **{"config.json": {"model_type": "mistral"}}), im),
        ("tokenizer.model, add_prefix_space false", spm(add_prefix_space=False), im),
        ("tokenizer.model, flags of special tokens",
         spm(added_tokens_decoder={**special, **numbered(340, flags("<x>", "lstrip", "rstrip"))}), strip),
        ("tokenizer.model, split_special_tokens", spm(split_special_tokens=True), im),
        ("do_lower_case false, lowercase in tokenizer.json",
         of("bert-uncased", bert, tokenizer_class="BertTokenizer", do_lower_case=False), cased),
        ("do_lower_case true, not in tokenizer.json",
         of("bert-cased", bert, tokenizer_class="BertTokenizer", do_lower_case=True), cased),
        ("do_lower_case by the class alone", of("bert-cased", bert, tokenizer_class="BertTokenizer"), cased),
        ("the class by config.json alone",
         dict(of("bert-cased", bert), **{"config.json": {"model_type": "bert"}}), cased),
        ("do_lower_case does not count for another class",
         of("bert-cased", bert, tokenizer_class="PreTrainedTokenizerFast", do_lower_case=True), cased),
        ("strip_accents false", of("bert-uncased", bert, tokenizer_class="BertTokenizer", strip_accents=False), cased),
        ("strip_accents true and cased",
         of("bert-cased", bert, tokenizer_class="BertTokenizer", do_lower_case=False, strip_accents=True), cased),
        ("tokenize_chinese_chars false",
         of("bert-uncased", bert, tokenizer_class="BertTokenizer", tokenize_chinese_chars=False), cased),
        ("vocab.txt, do_lower_case false", vocab(do_lower_case=False), cased),
        ("vocab.txt, do_lower_case by the class", vocab(), cased),
        ("add_prefix_space true in tokenizer_config.json",
         of("gpt2", {"330": flags("<|im_end|>")}, tokenizer_class="GPT2Tokenizer", add_prefix_space=True), blank),
        ("add_prefix_space of tokenizer.json does not count for the class GPT2Tokenizer",
         of("gpt2-prefix", {"330": flags("<|im_end|>")}, tokenizer_class="GPT2Tokenizer"), blank),
        ("vocab.json, add_prefix_space", merges("GPT2Tokenizer", add_prefix_space=True), blank),
        ("vocab.json, added_tokens_decoder",
         merges("GPT2Tokenizer", added_tokens_decoder={"330": flags("<|endoftext|>"), "331": flags("<x>", "rstrip")}), strip),
        ("vocab.json, added_tokens.json",
         dict(merges("Qwen2Tokenizer"), **{"added_tokens.json": {"<|endoftext|>": 330, "<x>": 331}}), strip),
        ("split_special_tokens",
         of("gpt2", {"330": flags("<x>"), "331": flags("Hello", special=False)}, tokenizer_class="PreTrainedTokenizerFast",
            split_special_tokens=True), strip + blank),
        ("eos_token that tokenizer.json does not have",
         of("gpt2", {"330": flags("<|endoftext|>")}, tokenizer_class="GPT2Tokenizer", eos_token="<x>"), strip),
        ("additional_special_tokens",
         of("gpt2", {"330": flags("<|endoftext|>")}, tokenizer_class="GPT2Tokenizer", additional_special_tokens=["<x>"]),
         strip),
        ("added_tokens.json beside tokenizer.json",
         dict(of("gpt2", {"330": flags("<|endoftext|>")}, tokenizer_class="PreTrainedTokenizerFast"),
              **{"added_tokens.json": {"<x>": 331}}), strip),
        ("clean_up_tokenization_spaces, model_max_length and padding_side change no ids",
         of("gpt2", {"330": flags("<|endoftext|>")}, tokenizer_class="PreTrainedTokenizerFast", padding_side="left",
            clean_up_tokenization_spaces=True, model_max_length=2), strip),
    ]
    ends = ["a <|endoftext|> b", "<x><|endoftext|><s> </s>", "<pad> <mask>"]
    none = dict(bos_token=None, eos_token=None, unk_token=None, pad_token=None)
    cases += [
        ("null in tokenizer_config.json: no token of the class", of("gpt2", tokenizer_class="GPT2Tokenizer", **none), ends),
        ("null in special_tokens_map.json: no token of the class",
         dict(of("gpt2", tokenizer_class="GPT2Tokenizer"),
              **{"special_tokens_map.json": {**none, "eos_token": "<x>"}}), ends),
        ("null in special_tokens_map.json: no token of tokenizer_config.json",
         dict(of("gpt2", tokenizer_class="GPT2Tokenizer", eos_token="<x>"), **{"special_tokens_map.json": none}), ends),
        ("null in tokenizer_config.json, and a token in special_tokens_map.json",
         dict(of("gpt2", tokenizer_class="GPT2Tokenizer", **none), **{"special_tokens_map.json": {"eos_token": "<x>"}}), ends),
        ("null for a token that tokenizer.json has",
         of("gpt2", {"330": flags("<|endoftext|>"), "331": flags("<x>")}, tokenizer_class="GPT2Tokenizer", **none), ends),
        ("null for one token of the class", of("gpt2", {"330": flags("<x>")}, tokenizer_class="RobertaTokenizer",
                                               **{"pad_token": None, "mask_token": "<x>"}), ends),
        ("null for tokens of the class BertTokenizer",
         of("bert-cased", tokenizer_class="BertTokenizer", do_lower_case=False, mask_token=None, pad_token=None),
         cased + ["[PAD] [UNK]"]),
        ("null beside added_tokens_decoder",
         of("gpt2", {"330": flags("<x>")}, tokenizer_class="GPT2Tokenizer", added_tokens_decoder={"330": flags("<x>")},
            **{**none, "eos_token": "<x>"}), ends),
        ("extra_special_tokens are numbered in the order of the file",
         of("gpt2", {"330": flags("<|endoftext|>")}, tokenizer_class="PreTrainedTokenizerFast",
            extra_special_tokens={"z_token": "<z>", "b_token": "<b>", "a_token": "<a>"}), ["<a><b><z>", "<z> <|endoftext|>"]),
    ]
    for base, cls, tokens in (("gpt2", "PreTrainedTokenizerFast", {"330": flags("<x>")}),
                              ("gpt2", "GPT2Tokenizer", {"330": flags("<|endoftext|>"), "331": flags("<x>")})):
        for f in ("lstrip", "rstrip", "single_word"):
            cases.append((f"{f} of additional_special_tokens, versions differ, {cls}", dict(
                of(base, tokens, tokenizer_class=cls),
                **{"special_tokens_map.json": {"additional_special_tokens": ["<n>", flags("<x>", f)]}}), strip + ["<n> <x>"]))
    for f in ("single_word", "lstrip", "rstrip"):
        cases.append((f + " in tokenizer.json", of("gpt2", {"330": flags("<|endoftext|>"), "331": flags("<x>", f)},
                                                   tokenizer_class="PreTrainedTokenizerFast"), strip))
        cases.append((f + " in added_tokens_decoder alone", of(
            "gpt2", {"330": flags("<|endoftext|>"), "331": flags("<x>")}, tokenizer_class="PreTrainedTokenizerFast",
            added_tokens_decoder={"330": flags("<|endoftext|>"), "331": flags("<x>", f)}), strip))
        cases.append((f + " in tokenizer.json alone", of(
            "gpt2", {"330": flags("<|endoftext|>"), "331": flags("<x>", f)}, tokenizer_class="PreTrainedTokenizerFast",
            added_tokens_decoder={"330": flags("<|endoftext|>"), "331": flags("<x>")}), strip))
    cases.append(("normalized", of("bert-uncased", {**bert, **numbered(125, flags("Hello", "normalized", special=False))},
                                   tokenizer_class="BertTokenizer"), cased))
    cases.append(("not normalized", of("bert-uncased", {**bert, **numbered(125, flags("Hello", special=False))},
                                       tokenizer_class="BertTokenizer"), cased))
    cases += published(bases, of)
    return [dict(kind=name, files=files, texts=texts) for name, files, texts in cases]


# Layouts of published models.
def published(bases, of):
    def cut(name, *parts, added, **config):
        files = of("gpt2", added, **config)
        files["tokenizer.json"]["pre_tokenizer"] = dict(type="Sequence", pretokenizers=list(parts))
        return files

    split = lambda regex: dict(type="Split", pattern={"Regex": regex}, behavior="Isolated", invert=False)
    bytes_ = lambda regex: dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=regex)
    digits = lambda each: dict(type="Digits", individual_digits=each)
    end = {"330": flags("<|endoftext|>")}
    names = {n: dict(flags("<|endoftext|>", "normalized"), __type="AddedToken") for n in ("bos_token", "eos_token", "unk_token")}
    numbers = ["in 1234567 x12 y3456", "\u00b2\u00b3\u00bd12\u0661\u0662\u0663 caf\u00e9 \u00b9\u2460", "((a))[[b]] !!", "<|endoftext|>12<|endoftext|>"]
    lines = ["one two  ", "a  \nb\t\n\n  c \n", "  \n", "\n\n a", "x = y;\r\n", "\u4e2d\u6587 123 \u00e9A-Z!?\uff01"]
    words = ["a (b|c) [d] e.", "one,two! three?four\u2026 \u3002x\uff0cy\u3001z\u0964\u06d4\u060c", " (( || )) \n x", "user's cat-hat"]
    llama = {"0": flags("<unk>"), "1": flags("<s>"), "2": flags("</s>")}
    infill = {**llama, **numbered(340, *(flags("\u2581<" + t + ">") for t in ("PRE", "MID", "SUF", "EOT")))}
    code = dict(tokenizer_class="CodeLlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token=None,
                fill_token="<FILL_ME>", prefix_token="\u2581<PRE>", middle_token="\u2581<MID>", suffix_token="\u2581<SUF>",
                eot_token="\u2581<EOT>", suffix_first=False, legacy=None)
    code_texts = ["Hello world", " \u2581<PRE> the cat \u2581<SUF>sat \u2581<MID>", "a</s>b <s> c", "one \u2581<EOT>"]
    bert = {str(i): flags(c) for i, c in enumerate(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"])}
    unusual = ["Hello world", "\ufb01ne\u00a0 \u2026 \uff28ello\tcafe\u0301 \u00aa\u0301b", " a\u200bb  \u4f60\u597d x", "<mask> [MASK] </s>", ""]
    gptj = dict(of("gpt2", end, tokenizer_class="GPT2Tokenizer", from_slow=True, add_prefix_space=False, **names),
                **{"vocab.json": "vocab.json", "merges.txt": "merges.txt", "config.json": {"model_type": "gptj"}})
    return [
        ("Falcon: digits behind ByteLevel", cut("falcon", dict(type="Punctuation", behavior="Contiguous"), bytes_(True),
            digits(False), split("[0-9][0-9][0-9]"), added=end, tokenizer_class="PreTrainedTokenizerFast",
            add_prefix_space=False, eos_token="<|endoftext|>"), numbers),
        ("any part behind ByteLevel that cuts", cut("x", bytes_(False), split("[a-m\u0120]+"), digits(True),
            dict(type="Punctuation", behavior="Isolated"), added=end, tokenizer_class="PreTrainedTokenizerFast"), numbers + lines),
        ("Bloom: a bracket inside a bracket", cut("bloom", split(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"),
            bytes_(False), added=end, tokenizer_class="PreTrainedTokenizerFast"), words + lines),
        ("hyphens in brackets", cut("x", split("[[a-c]x-]+|[-.]+|[\\w-]+|[!-/:-@]"), bytes_(False), added=end,
            tokenizer_class="PreTrainedTokenizerFast"), words + ["a-b-x-c d-e-f", "--..a\\b"]),
        ("DeepSeek LLM: the end of a line", cut("deepseek", split("[\r\n]"), split("\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6]+"),
            split("\\s?[!-/:-~\uff01-\uff0f]+"), split("\\s+$"), split("[\u4e00-\u9fa5]+"), digits(True), bytes_(False), added=end,
            tokenizer_class="PreTrainedTokenizerFast"), lines),
        ("the start and the end of each line", cut("x", split("^ +|^a|\\s+$|b$"), bytes_(True), added=end,
            tokenizer_class="PreTrainedTokenizerFast"), lines + ["  a\n  ab\nb\n", "ab\n", "a"]),
        ("GPT-J: from_slow beside the files that it asks for", gptj, numbers),
        ("CodeLlama, versions differ", dict(of("llama", infill, additional_special_tokens=[
            "\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>", "\u2581<EOT>"], **code)), code_texts),
        ("CodeLlama, whose class names the tokens, versions differ", of("llama", llama, tokenizer_class="CodeLlamaTokenizer"),
         code_texts),
        ("CodeLlama, tokenizer.model, versions differ", {"tokenizer.model": "spm-bpe", "tokenizer_config.json": dict(
            code, legacy=False)}, code_texts),
        ("T5", of("t5", {"0": flags("<pad>"), "1": flags("</s>"), "2": flags("<unk>")}, tokenizer_class="T5Tokenizer"),
         unusual + ["<extra_id_0> Hello <extra_id_99>"]),
        ("T5, extra_ids", of("t5", {"0": flags("<pad>"), "1": flags("</s>"), "2": flags("<unk>")}, tokenizer_class="T5Tokenizer",
            extra_ids=2, eos_token="</s>"), unusual + ["<extra_id_0> Hello <extra_id_2>"]),
        ("XLM-RoBERTa, versions differ", of("xlm-roberta", {"0": flags("<s>"), "1": flags("<pad>"), "2": flags("</s>"), "3": flags("<unk>"),
            str(len(json.loads(bases["xlm-roberta"])["model"]["vocab"]) - 1): flags("<mask>", "lstrip")},
            tokenizer_class="XLMRobertaTokenizer"), unusual),
        ("ALBERT", of("albert", bert, tokenizer_class="AlbertTokenizer", do_lower_case=True), unusual),
        ("Unigram with byte_fallback", of("unigram-bytes", llama, tokenizer_class="PreTrainedTokenizerFast"), unusual),
        ("Unigram with some bytes", of("unigram-some-bytes", llama, tokenizer_class="PreTrainedTokenizerFast"), unusual),
        ("prepend_scheme first behind rules", of("t5-first", {"0": flags("<pad>"), "1": flags("</s>"), "2": flags("<unk>")}, tokenizer_class="PreTrainedTokenizerFast"),
         unusual + ["\u200b\u200bHello", "\u200bHello</s>\u200b x", "  Hello"]),
    ]


# ---- the reference ---------------------------------------------------------------------------------------------------


def write_files(folder, files, content):
    for name, value in files.items():
        with open(os.path.join(folder, name), "wb") as f:
            if isinstance(value, str):
                value = content[value]
                f.write(base64.b64decode(value["base64"]) if isinstance(value, dict) else value.encode())
            else:
                f.write(json.dumps(value).encode())


def ask(path):
    """In a process with one version of transformers: reads directories, writes what it says."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import logging
    import warnings
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    import transformers
    from transformers import AutoTokenizer
    four = transformers.__version__.startswith("4")
    with open(path, encoding="utf-8") as f:
        content = json.loads(f.readline())["content"]
        for line in f:
            case = json.loads(line)
            answer = {}
            for mode in ("fast4", "slow4") if four else ("auto5",):
                with tempfile.TemporaryDirectory() as folder:
                    write_files(folder, case["files"], content)
                    try:
                        t = AutoTokenizer.from_pretrained(folder, **({"use_fast": mode == "fast4"} if four else {}))
                        if mode == "slow4" and t.is_fast:
                            continue
                        answer[mode] = [t.encode(x, add_special_tokens=False) for x in case["texts"]]
                        if mode != "slow4":
                            whole = t.encode("Hello world")
                            ids = t.encode("Hello world", add_special_tokens=False)
                            at = next(i for i in range(len(whole)) if whole[i:i + len(ids)] == ids)
                            answer["special " + mode] = dict(bos=t.bos_token_id, eos=t.eos_token_id, before=whole[:at],
                                                             after=whole[at + len(ids):])
                    except Exception as e:
                        answer[mode] = "%s: %s" % (type(e).__name__, str(e)[:120])
            print(json.dumps(answer), flush=True)


def main():
    pythons = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run([pythons[1], __file__, "--bases", folder], check=True, capture_output=True, text=True).stdout
    bases = json.loads(made)
    content = {k: v for k, v in bases.items() if k != "pieces"}
    gpt2 = json.loads(bases["gpt2"])["model"]
    by_id = lambda v: [k for k, _ in sorted(v.items(), key=lambda kv: kv[1])]
    content["vocab.json"] = json.dumps(gpt2["vocab"])
    content["merges.txt"] = "#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in gpt2["merges"])
    content["vocab.txt"] = "".join(t + "\n" for t in by_id(json.loads(bases["bert-cased"])["model"]["vocab"]))
    kinds = list(KINDS)
    cases = named(bases)
    num_named = len(cases)
    for i in range(NUM_RANDOM):
        r = random.Random(1000 + i)
        kind = kinds[i % len(kinds)]
        files = directory(r, kind, bases)
        cases.append(dict(kind=kind, files=files, texts=texts_of(r, files)))
    for i in range(NUM_UNIGRAM):
        r = random.Random(5000 + i)
        kind = list(UNIGRAM_KINDS)[i % len(UNIGRAM_KINDS)]
        files = directory(r, kind, bases)
        cases.append(dict(kind=kind, files=files, texts=texts_of(r, files, UNUSUAL)))
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as f:
        f.write(json.dumps(dict(content=content)) + "\n")
        f.writelines(json.dumps(c) + "\n" for c in cases)
        f.flush()
        for python in pythons:
            out = subprocess.run([python, __file__, "--ask", f.name], check=True, capture_output=True, text=True).stdout
            for case, line in zip(cases, out.splitlines(), strict=True):
                case.update(json.loads(line))
    # tokenizer.json repeats a model: what it shares with its base is referred to.
    by_model = {json.dumps(json.loads(text)["model"]): name for name, text in bases.items() if isinstance(text, str)}
    for case in cases:
        model = case["files"].get("tokenizer.json")
        if model:
            case["base"] = base = by_model[json.dumps(model["model"])]
            whole = json.loads(bases[base])
            case["files"]["tokenizer.json"] = {k: v for k, v in model.items() if k not in whole or whole[k] != v}
    last = num_named + NUM_RANDOM
    for name, part in (("named", cases[:num_named]), ("random", cases[num_named:last]), ("unigram", cases[last:])):
        used = {v for c in part for v in c["files"].values() if isinstance(v, str)} | {c["base"] for c in part if "base" in c}
        with open(os.path.join(HERE, name + ".jsonl"), "w", encoding="utf-8") as f:
            f.write(json.dumps(dict(content={k: content[k] for k in sorted(used)}), ensure_ascii=False) + "\n")
            f.writelines(json.dumps(c, ensure_ascii=False) + "\n" for c in part)


if __name__ == "__main__":
    if sys.argv[1] == "--bases":
        found = base_files(sys.argv[2])
        print(json.dumps({k: {"base64": base64.b64encode(v).decode()} if isinstance(v, bytes) else v for k, v in found.items()}))
    elif sys.argv[1] == "--ask":
        ask(sys.argv[2])
    else:
        main()
