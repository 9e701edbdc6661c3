#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the fixtures of tokenizers: small ones, trained on the corpus beside this file, with the pipelines of published
models, and the ids and texts that the reference implementations give.

    python3 make_fixtures.py        needs the packages tokenizers 0.23 and sentencepiece 0.2

records.json holds the texts. For each tokenizer a folder NAME with its files and expected.txt: for every record two
lines, the ids and what they decode to (as JSON). unicode.txt: the ranges of the characters that Unicode 8.0 knows (the reference's tables are
of that age; later characters are not compared), and for each normalizer a line per block of 256 code points that it
changes, with the CRC-32 of what becomes of "a" + character + "\u0301b" for each of them.
"""
import json
import os
import shutil
import subprocess
import zlib

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
            "?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]


def corpus():
    with open(os.path.join(HERE, "corpus.txt"), encoding="utf-8", newline="") as f:
        return f.read().split("\n")


def records():
    lines = corpus()
    made = ["", " ", "\n", "a", "\n\n\na\n \n  b\n", "x\r\ny\r\n\r\nz", "\tq\n\t\tr", "end\n", " \u00a0 \u3000x",
            "The end.\nNext line\n\n  Indented\nÜber\n中文\n1st", "\n".join(lines), "  ".join(lines[:6]),
            "<|endoftext|>", "a<|endoftext|><|endoftext|>b", " <|endoftext|> x", "<s></s>", "x <mask> y", "x  <mask>  y",
            "[MASK]", " [MASK] ", "[CLS]a[SEP]", "▁", "▁▁a", " ▁ a", "<0x41>", "NEWword newword new word NewWord",
            "newwords anewword", "word" * 60, "é" * 50, "a b " * 40]
    return lines + made


def byte_level(name, pattern, normalizer=None, special=(), ignore_merges=False, bos=None, size=900):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        t.normalizer = normalizer
    if pattern is None:
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        patterns = [pattern] if isinstance(pattern, str) else pattern
        t.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                  show_progress=False)
    t.train_from_iterator(corpus(), trainer)
    t.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    if bos:
        t.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
                                          special_tokens=[(bos, t.token_to_id(bos))])])
    return name, t


def word_piece(name, lowercase):
    t = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    t.normalizer = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=None,
                                              lowercase=lowercase)
    t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    t.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    t.train_from_iterator(corpus(), trainers.WordPieceTrainer(
        vocab_size=1500, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False))
    return name, t


def llama2(folder):
    """A SentencePiece model of Llama 2's kind, and the tokenizer.json that says the same."""
    model = os.path.join(folder, "tokenizer")
    with open(os.path.join(folder, "text"), "w", encoding="utf-8") as f:
        f.write("\n".join(corpus()))
    sentencepiece.SentencePieceTrainer.train(
        input=os.path.join(folder, "text"), model_prefix=model, vocab_size=1000, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        allow_whitespace_only_pieces=True, character_coverage=0.995, num_threads=1, minloglevel=2, max_sentence_length=10000)
    os.remove(os.path.join(folder, "text"))
    os.remove(model + ".vocab")
    sp = sentencepiece.SentencePieceProcessor(model_file=model + ".model")
    vocab = {sp.id_to_piece(i): i for i in range(sp.get_piece_size())}
    merges = []  # every split of a piece into pieces, by the id of the piece, as transformers' converter makes them
    for piece, i in vocab.items():
        if sp.is_byte(i) or sp.is_control(i) or sp.is_unknown(i):
            continue
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in vocab and piece[k:] in vocab]
        merges += [(i, vocab[a], vocab[b], a, b) for a, b in splits]
    merges = [(a, b) for _, _, _, a, b in sorted(merges)]
    t = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    t.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in ["<unk>", "<s>", "</s>"]])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return sp, t


def mixed():
    """No published model: the parts and flags that the others do not use."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    t.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first"),
                                               pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.Punctuation("merged_with_previous")])
    t.decoder = decoders.Metaspace(prepend_scheme="first")
    t.train_from_iterator(corpus()[:20], trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False))
    t.add_tokens([AddedToken("newword", single_word=True, normalized=True), AddedToken("<mask>", lstrip=True, rstrip=True,
                                                                                     normalized=False)])
    return "mixed", t


def whitespace():
    t = Tokenizer(models.BPE(unk_token="<unk>", continuing_subword_prefix="##"))
    t.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(),
                                         normalizers.Replace(Regex(r"\s{3,}"), "  "), normalizers.Strip()])
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(False),
                                               pre_tokenizers.Split("e", "merged_with_next"),
                                               pre_tokenizers.Split(Regex("[aou]+"), "contiguous"),
                                               pre_tokenizers.Split("l", "removed")])
    t.decoder = decoders.WordPiece()
    t.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"],
                                                       continuing_subword_prefix="##", show_progress=False))
    return "whitespace", t


def write_expected(folder, encode, decode):
    with open(os.path.join(folder, "expected.txt"), "w", encoding="utf-8") as f:
        for text in records():
            ids = encode(text)
            f.write(" ".join(map(str, ids)) + "\n" + json.dumps(decode(ids)) + "\n")


def write(folder, t):
    t.save(os.path.join(folder, "tokenizer.json"), pretty=False)
    write_expected(folder, lambda text: t.encode(text, add_special_tokens=False).ids,
                   lambda ids: t.decode(ids, skip_special_tokens=False))


def fresh(name):
    folder = os.path.join(HERE, name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return folder


def split_files(name, t, config):
    """The same tokenizer as vocab.json + merges.txt, or vocab.txt."""
    folder = fresh(name)
    model = json.loads(t.to_str())["model"]
    if model["type"] == "BPE":
        with open(os.path.join(folder, "vocab.json"), "w", encoding="utf-8") as f:
            json.dump({k: v for k, v in sorted(model["vocab"].items(), key=lambda kv: kv[1])}, f, ensure_ascii=False)
        with open(os.path.join(folder, "merges.txt"), "w", encoding="utf-8") as f:
            f.write("#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in model["merges"]))
    else:
        with open(os.path.join(folder, "vocab.txt"), "w", encoding="utf-8") as f:
            f.write("".join(k + "\n" for k, _ in sorted(model["vocab"].items(), key=lambda kv: kv[1])))
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f, indent=1)
    write_expected(folder, lambda text: t.encode(text, add_special_tokens=False).ids,
                   lambda ids: t.decode(ids, skip_special_tokens=False))


def write_unicode():
    kinds = {"NFC": normalizers.NFC(), "NFD": normalizers.NFD(), "NFKC": normalizers.NFKC(), "NFKD": normalizers.NFKD(),
             "Lowercase": normalizers.Lowercase(), "StripAccents": normalizers.StripAccents(),
             "Bert": normalizers.BertNormalizer(lowercase=True)}
    # Python does not know the age of a character, Perl does.
    known = subprocess.run(["perl", "-e", r'for (0 .. 0x10FFFF) { print "$_\n" if ($_ < 0xD800 || $_ > 0xDFFF) && '
                                          r'chr($_) =~ /\p{Present_In: 8.0}/ }'],
                           check=True, capture_output=True, text=True).stdout
    known = list(map(int, known.split()))
    starts = [c for c, before in zip(known, [-2] + known) if c != before + 1]
    ends = [c for c, after in zip(known, known[1:] + [-2]) if c + 1 != after]
    by_block = {}
    for c in known:
        by_block.setdefault(c // 256, []).append(c)
    with open(os.path.join(HERE, "unicode.txt"), "w", encoding="utf-8") as f:
        for start, end in zip(starts, ends):
            f.write(f"known {start:x} {end:x}\n")
        for name, n in kinds.items():
            for block, chars in by_block.items():
                texts = [f"a{chr(c)}\u0301b" for c in chars]
                out = [n.normalize_str(x) for x in texts]
                if out != texts:
                    f.write(f"{name} {block:x} {zlib.crc32(''.join(out).encode()):08x}\n")


def main():
    gpt2 = byte_level("gpt2", None, special=["<|endoftext|>"])
    llama3 = byte_level("llama3", LLAMA3, special=["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
                        ignore_merges=True, bos="<|begin_of_text|>")
    qwen2 = byte_level("qwen2", QWEN2, normalizers.NFC(), special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    cased, uncased = word_piece("bert-cased", False), word_piece("bert-uncased", True)
    for name, t in [gpt2, llama3, qwen2, byte_level("o200k", O200K, special=["<|endoftext|>"], size=600),
                    byte_level("deepseek3", DEEPSEEK, normalizers.Sequence([]), size=600), cased, uncased, mixed(),
                    whitespace()]:
        write(fresh(name), t)
    split_files("gpt2-files", gpt2[1], {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>",
                                        "added_tokens_decoder": {str(gpt2[1].token_to_id("<|endoftext|>")): {
                                            "content": "<|endoftext|>", "lstrip": False, "rstrip": False,
                                            "normalized": False, "single_word": False, "special": True}}})
    split_files("bert-files", cased[1], {"tokenizer_class": "BertTokenizer", "do_lower_case": False})
    folder = fresh("llama2")
    sp, t = llama2(folder)
    write(folder, t)
    folder_sp = fresh("llama2-sp")
    shutil.move(os.path.join(folder, "tokenizer.model"), os.path.join(folder_sp, "tokenizer.model"))
    write_expected(folder_sp, sp.encode, sp.decode)
    with open(os.path.join(HERE, "records.json"), "w", encoding="utf-8") as f:
        json.dump(records(), f, ensure_ascii=False, indent=0)
    write_unicode()


if __name__ == "__main__":
    main()
