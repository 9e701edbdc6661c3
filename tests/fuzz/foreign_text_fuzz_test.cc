// SPDX-License-Identifier: Apache-2.0
// Hostile text at every place from which text reaches a terminal: strings of all files that the tools read, names of
// files and directories, options. Whatever the tool makes of it, its output is UTF-8 without control characters, no
// line of it comes from the text, messages are short, and the tool ends with a status of its own.

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>

#include "base/json.h"
#include "base/utf8.h"
#include "checkpoint/reader.h"
#include "formats/hdf5.h"
#include "fuzz/rounds.h"
#include "temp_directory.h"
#include "test_data.h"
#include "zip_file.h"

namespace ds {
namespace foreign_text_fuzz_test {

namespace fs = std::filesystem;
using testing::read_file;
using testing::write_file;
using Random = std::mt19937;

size_t below(Random& random, size_t n) { return static_cast<size_t>(random() % std::max<size_t>(n, 1)); }

constexpr std::string_view kForged = "forged: you have been owned";

// Sequences that terminals obey, bytes that are not text, and characters that begin a line.
constexpr std::array<std::string_view, 18> kHostile = {"\x1b]0;owned\x07",
                                                       "\x1b[2J\x1b[31m",
                                                       "\x1bP$q\"p\x1b\\",
                                                       "\u009b31m",
                                                       "\u0085",
                                                       "\x7f\x7f",
                                                       "\b\b\b",
                                                       "\r",
                                                       "\n",
                                                       "\x01\x02\x1f",
                                                       "\u202emoc",
                                                       "\u2066x\u2069",
                                                       "\u2028",
                                                       "\U000e0041",
                                                       "\xff\xfe",
                                                       "\xc3(",
                                                       "\x9b"
                                                       "31m",
                                                       "\xed\xa0\x80"};

std::string hostile(Random& random, size_t most) {
  std::string text;
  for (size_t parts = 1 + below(random, 4); parts > 0; --parts) {
    text += below(random, 2) == 0 ? "a" : "";
    text += kHostile[below(random, kHostile.size())];
    if (below(random, 3) == 0) text += fmt::format("\nds-train: error: {}\n{}", kForged, kForged);
  }
  if (below(random, 8) == 0) {
    const std::string part = text;
    while (text.size() + part.size() <= most) text += part;
  }
  return text.substr(0, most);
}

// As a string of JSON: escaped, as an honest writer would do it, or as it is.
std::string json_string(const std::string& text, bool escaped) {
  if (escaped) return Json(text).dump(-1, ' ', true, Json::error_handler_t::replace);
  std::string out = "\"";
  for (const char c : text) out += c == '"' || c == '\\' ? std::string{'\\', c} : std::string{c};
  return out + '"';
}

// `json` with one of its strings, key or value, replaced by, or lengthened by, hostile text.
std::string with_hostile_string(const std::string& json, Random& random) {
  std::vector<std::pair<size_t, size_t>> strings;  // of the quotes
  for (size_t begin = 0; (begin = json.find('"', begin)) != std::string::npos;) {
    size_t end = begin + 1;
    while (json[end] != '"') end += json[end] == '\\' ? 2 : 1;
    strings.emplace_back(begin, end);
    begin = end + 1;
  }
  const auto [begin, end] = strings[below(random, strings.size())];
  std::string text = hostile(random, size_t{1} << 20);
  if (below(random, 2) == 0) text = json.substr(begin + 1, end - begin - 1) + text;
  return json.substr(0, begin) + json_string(text, below(random, 4) > 0) + json.substr(end + 1);
}

// A name that a file can have.
std::string hostile_name(Random& random) {
  std::string name = hostile(random, 100);
  std::replace(name.begin(), name.end(), '/', '-');
  return name.starts_with('-') ? "_" + name : name;
}

struct Said {
  int status = 0;
  std::string out, errors;
};

// A tool, in a directory, with `extra` in its environment.
Said run(const std::vector<std::string>& words, const std::string& in, const std::vector<std::string>& extra = {}) {
  std::vector<std::string> arguments = words, variables;
  arguments[0] = fmt::format("{}/{}", DS_BIN_DIR, words[0]);
  for (char** v = environ; *v != nullptr; ++v) variables.emplace_back(*v);
  std::erase_if(variables, [](const std::string& v) { return v.starts_with("CUDA_VISIBLE_DEVICES="); });
  variables.insert(variables.end(), extra.begin(), extra.end());
  variables.emplace_back("CUDA_VISIBLE_DEVICES=");
  const auto pointers = [](std::vector<std::string>& strings) {
    std::vector<char*> p;
    for (std::string& s : strings) p.push_back(s.data());
    p.push_back(nullptr);
    return p;
  };
  const std::vector<char*> argv = pointers(arguments), environment = pointers(variables);
  const std::string out = in + "/.out", errors = in + "/.errors";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, errors.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_addchdir_np(&actions, in.c_str());
  pid_t pid = 0;
  const int failed = ::posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  EXPECT_EQ(failed, 0) << argv[0];
  if (failed != 0) return {};
  int status = 0;
  for (int waited = 0; ::waitpid(pid, &status, WNOHANG) == 0; ++waited) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (waited == 30'000) ::kill(pid, SIGKILL);
  }
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out), read_file(errors)};
}

class ForeignText : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    base_ = std::make_unique<testing::TempDirectory>();
    write_file(*base_ / "cfg.json", kConfig);
    std::string text;
    for (int i = 0; i < 200; ++i) text += fmt::format("line {} of a text to train on\n", i * i);
    write_file(*base_ / "text.txt", text);
    const Said said = run({"ds-train", "cfg.json", "--out", "run"}, base_->path());
    ASSERT_EQ(said.status, 0) << said.errors;
  }
  static void TearDownTestSuite() { base_.reset(); }

  void SetUp() override { fs::copy(base_->path(), dir_.path(), fs::copy_options::recursive); }

  std::string step() const { return dir_ / "run/step-00000001"; }

  static std::string what_is_wrong(std::string_view text) {
    for (std::string_view rest = text; !rest.empty();) {
      const Utf8Character c = first_character(rest);
      const size_t at = text.size() - rest.size();
      if (c.code == kNotUtf8) return fmt::format("byte {} is not UTF-8", at);
      const bool control = (c.code < 0x20 && c.code != '\n' && c.code != '\t') || (c.code >= 0x7f && c.code <= 0x9f);
      const bool turns = (c.code >= 0x202a && c.code <= 0x202e) || (c.code >= 0x2066 && c.code <= 0x2069);
      if (control || turns || c.code == 0x2028 || c.code >= 0xe0000) return fmt::format("U+{:04X} at {}", c.code, at);
      rest.remove_prefix(c.bytes.size());
    }
    for (const std::string_view start : {"forged: ", "ds-train: error: forged: "}) {
      if (text.starts_with(start) || text.find(fmt::format("\n{}", start)) != text.npos) return "a line is forged";
    }
    for (const std::string_view leak : {"[json.exception", "internal error", "terminate called"}) {
      if (text.find(leak) != text.npos) return fmt::format("it says {}", leak);
    }
    return "";
  }

  // A tool and its arguments, in dir_. True: it was done.
  bool check(const std::vector<std::string>& words) {
    constexpr size_t kMostErrors = 48 << 10;
    const Said said = run(words, dir_.path(), extra_);
    const std::string context = Json(words).dump(-1, ' ', true, Json::error_handler_t::replace) + "\n";
    const bool is_of_a_program = words[0] == "ds-launch" && (said.status == 126 || said.status == 127);
    EXPECT_TRUE(said.status <= 4 || is_of_a_program) << said.status << " " << context << said.errors.substr(0, 4096);
    EXPECT_EQ(what_is_wrong(said.out), "") << context << said.out.substr(0, 4096);
    EXPECT_EQ(what_is_wrong(said.errors), "") << context << said.errors.substr(0, 4096);
    EXPECT_LE(said.errors.size(), kMostErrors) << context;
    EXPECT_EQ(said.status == 0 || !said.errors.empty(), true) << context << "fails without a word";
    ++(said.status == 0 ? done_ : refused_);
    return said.status == 0;
  }

  static constexpr const char* kConfig = R"({
    "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2},
    "data": {"train": "text.txt", "seq_length": 16, "tokenizer": "bytes", "format": "text"},
    "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "threads": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}, "scheduler": {"type": "WarmupLR"},
    "zero_optimization": {"stage": 2}, "reduce_order": "micro", "communication": {"backend": "auto"},
    "activation_checkpointing": {"granularity": "none"}, "steps": 1})";

  static std::unique_ptr<testing::TempDirectory> base_;
  testing::TempDirectory dir_;
  std::vector<std::string> extra_;  // of the environment
  Random random_{20261123};
  int done_ = 0, refused_ = 0;
};
std::unique_ptr<testing::TempDirectory> ForeignText::base_;

TEST_F(ForeignText, OfConfigurations) {
  constexpr const char* kModel = R"({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 256,
    "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "activation_function": "gelu_new", "torch_dtype": "float32",
    "task_specific_params": {"text-generation": {"do_sample": true}}})";
  fs::create_directory(dir_ / "model");
  write_file(dir_ / "model/config.json", kModel);
  for (int i = 0; i < testing::rounds(4); ++i) {
    write_file(dir_ / "h.json", with_hostile_string(kConfig, random_));
    check({"ds-train", "h.json", "--check"});
    check({"ds-memreport", "h.json"});
    check({"ds-train", "cfg.json", "--check", "--json", "--set", "data.train=" + hostile(random_, 1000)});
    check({"ds-train", "cfg.json", "--set", hostile(random_, 1000)});
    write_file(dir_ / "model/config.json", with_hostile_string(kModel, random_));
    check({"ds-memreport", "model"});
    check({"ds-train", "cfg.json", "--check", "--set", R"(model={"path":"model"})"});
  }
  std::string keys = "{";  // each of them is a mistake
  for (int i = 0; i < 300; ++i)
    keys += fmt::format("{}{}: 1", i > 0 ? "," : "", json_string(fmt::format("\x1b{}", i), true));
  write_file(dir_ / "h.json", keys + "}");
  check({"ds-train", "h.json"});
  write_file(dir_ / "h.json", fmt::format("{{{}: 1}}", json_string(std::string(1 << 20, 'k'), true)));
  check({"ds-train", "h.json"});
  EXPECT_GT(refused_, 10);
}

TEST_F(ForeignText, OfTokenizers) {
  const std::vector<std::pair<std::string, std::string>> files = {{"whitespace", "tokenizer.json"},
                                                                  {"mixed", "tokenizer.json"},
                                                                  {"bert-cased", "tokenizer.json"},
                                                                  {"llama2", "tokenizer.json"},
                                                                  {"gpt2-files", "vocab.json"},
                                                                  {"gpt2-files", "merges.txt"},
                                                                  {"bert-files", "tokenizer_config.json"},
                                                                  {"bert-files", "vocab.txt"}};
  for (int i = 0; i < testing::rounds(8); ++i) {
    const auto& [tokenizer, file] = files[static_cast<size_t>(i) % files.size()];
    fs::remove_all(dir_ / "tokenizer");
    fs::copy(testing::test_data("tokenizers/" + tokenizer), dir_ / "tokenizer");
    const std::string path = dir_ / ("tokenizer/" + file);
    if (!fs::exists(path)) continue;
    std::string text = read_file(path);
    if (file.ends_with(".json")) {
      // Mostly before the vocabulary: in a field that decides something, not in one of a thousand words.
      const size_t model = text.find("\"vocab\""), head = text.find("\"model\"");
      const size_t cut = head != text.npos && model != text.npos && below(random_, 4) > 0 ? model : text.size();
      text = with_hostile_string(text.substr(0, cut), random_) + text.substr(cut);
    } else {
      text.insert(below(random_, text.size()), hostile(random_, 200));
    }
    write_file(path, text);
    check({"ds-train", "cfg.json", "--set", "data.tokenizer=tokenizer", "--set", "model.vocab_size=40000"});
  }
}

TEST_F(ForeignText, OfCheckpoints) {
  const std::string manifest = step() + "/manifest.json", good = read_file(manifest);
  const std::string body = good.substr(0, good.rfind(",\n\"checksum\""));
  const std::string head = body.substr(0, body.find("\"pieces\"")), pieces = body.substr(head.size());
  for (int i = 0; i < testing::rounds(4); ++i) {
    const std::string text = with_hostile_string(head, random_) + pieces;
    write_file(manifest, fmt::format("{},\n\"checksum\": \"{:016x}\"\n}}\n", text,
                                     checksum(text.data(), static_cast<i64>(text.size()))));
    check({"ds-shard", "show", "--parameters", "run"});
    check({"ds-shard", "show", "--json", "--parameters", "run"});
    check({"ds-memreport", "run"});
    check({"ds-ckpt-merge", "run", "-o", fmt::format("merged{}.safetensors", i)});
    check({"ds-train", "cfg.json", "--resume", "run", "--steps", "2"});
    write_file(manifest, good);
    write_file(dir_ / "run/latest", hostile(random_, 200));
    check({"ds-shard", "show", "run"});
    check({"ds-train", "cfg.json", "--out", "run", "--resume", "latest"});
    write_file(dir_ / "run/latest", "step-00000001\n");
  }
  EXPECT_GT(done_, 4);
}

TEST_F(ForeignText, OfTensorFiles) {
  const auto le = [](u64 x) { return testing::le(x); };
  for (int i = 0; i < testing::rounds(4); ++i) {
    const std::string name = hostile(random_, 300), key = hostile(random_, 300), value = hostile(random_, 300);
    const bool escaped = below(random_, 4) > 0;
    const std::string header =
        fmt::format(R"({{"__metadata__": {{{}: {}}}, {}: {{"dtype": {}, "shape": [2], "data_offsets": [0, 8]}}}})",
                    json_string(key, escaped), json_string(value, escaped),
                    json_string(below(random_, 3) > 0 ? name : "x", escaped),
                    below(random_, 4) > 0 ? "\"F32\"" : json_string(hostile(random_, 1 << 20), escaped));
    write_file(dir_ / "h.safetensors", le(header.size()) + header + std::string(8, '\0'));

    const std::string tensor = testing::tensor(testing::storage("FloatStorage", "0", 2), 0, {2}, {1});
    const std::string foreign = testing::global("evil" + name.substr(0, name.find('\n')), "call");
    write_file(dir_ / "h.pt",
               testing::torch_file(
                   testing::pickle(testing::dict({{name, tensor}, {key, below(random_, 2) == 0 ? foreign : tensor}})),
                   {{"0", std::string(8, '\0')}}));
    write_file(dir_ / "z.pt", testing::make_zip({{.name = name, .data = "x"}}));

    std::string plain = name;
    std::replace(plain.begin(), plain.end(), '/', '-');
    const std::map<std::string, std::string> attributes = {{value.substr(0, 60), key}};
    try {
      create_hdf5(dir_ / "h.h5", {{.info = {plain, DType::F32, {2}}}}, attributes);
    } catch (const Error&) {  // which the library refuses as well
    }

    int n = 0;
    for (const char* file : {"h.safetensors", "h.pt", "z.pt", "h.h5"}) {
      if (!fs::exists(dir_ / file)) continue;
      const std::string out = fmt::format("sharded-{}-{}", i, n++);
      if (check({"ds-shard", file, "-o", out})) check({"ds-shard", "show", "--parameters", out});
      check({"ds-ckpt-merge", file, "-o", out + ".safetensors"});
      check({"ds-train", "cfg.json", "--weights", file});
    }
    fs::remove(dir_ / "h.h5");
    std::string index = fmt::format(R"({{"metadata": {{}}, "weight_map": {{{}: {}}}}})", json_string(name, escaped),
                                    json_string(below(random_, 2) == 0 ? key : "h.safetensors", escaped));
    write_file(dir_ / "h.safetensors.index.json", index);
    check({"ds-shard", "h.safetensors.index.json", "-o", fmt::format("of-index-{}", i)});
  }
}

TEST_F(ForeignText, OfWhatToolsWriteForEachOther) {
  constexpr const char* kLinks = R"({"schema": "ds-links/1", "ranks": 2, "hosts": ["a"],
    "links": [{"backend": "shm", "class": "numa", "latency_s": 1e-6, "bandwidth_bytes_per_s": 1e10, "pairs": 1}],
    "operations": [{"op": "all_reduce", "backend": "shm", "form": "in_place", "ranks": 2, "alpha_s": 1e-6,
                    "beta_s_per_byte": 1e-10, "rms_relative_error": 0.1}]})";
  constexpr const char* kMachine = R"({"schema": "ds-machine/1", "device": "cpu", "ranks_per_node": 1, "threads": 1,
    "cores": 1, "own_stream": true, "op_overhead_s": 1e-6, "flops_per_s": {"matmul": {"fp32": [[1e6, 1e9]],
    "bf16": [[1e6, 1e9]]}}, "memory_bytes_per_s": [[1e6, 1e9]], "bytes_per_s": {"add": {"fp32": [[1e6, 1e9]]}}})";
  const std::string metrics = read_file(dir_ / "run/metrics.jsonl");
  for (int i = 0; i < testing::rounds(5); ++i) {
    write_file(dir_ / "h.jsonl", with_hostile_string(metrics.substr(0, metrics.find('\n')), random_) +
                                     metrics.substr(metrics.find('\n')));
    check({"ds-memreport", "h.jsonl", "--plot", "-"});
    check({"ds-memreport", "h.jsonl", "--json"});
    check({"ds-memreport", "h.jsonl", "--plot", "h.svg"});
    if (fs::exists(dir_ / "h.svg")) {
      EXPECT_EQ(what_is_wrong(read_file(dir_ / "h.svg")), "");
    }
    write_file(dir_ / "h.json", with_hostile_string(kLinks, random_));
    check({"ds-memreport", "cfg.json", "--gpu", "h100", "--links", "h.json"});
    write_file(dir_ / "h.json", with_hostile_string(kMachine, random_));
    check({"ds-memreport", "cfg.json", "--machine", "h.json"});
    write_file(dir_ / "hosts", "a slots=2\n" + hostile(random_, 1 << 20) + " slots=" + hostile(random_, 100));
    check({"ds-launch", "--hostfile", "hosts", "--dry-run", "true"});
  }
}

// Names of files that are there, of files that are not, values of options and of the environment.
TEST_F(ForeignText, OfTheCommandLine) {
  for (int i = 0; i < testing::rounds(3); ++i) {
    const std::string name = hostile_name(random_), run = name + ".run", config = name + ".json";
    fs::copy(dir_ / "run", dir_ / run, fs::copy_options::recursive | fs::copy_options::skip_existing);
    write_file(dir_ / config, kConfig);
    check({"ds-shard", "show", run});
    check({"ds-shard", "show", "--json", run});
    check({"ds-ckpt-merge", run, "-o", name + ".safetensors"});
    check({"ds-ckpt-merge", run, "-o", name + ".hf", "--format", "hf", "--json"});
    check({"ds-shard", run, "-o", name + ".sharded"});
    check({"ds-memreport", run + "/metrics.jsonl", "--plot", "-"});
    check({"ds-memreport", run});
    check({"ds-train", config, "--out", name + ".out", "--json"});
    check({"ds-train", config, "--resume", run, "--steps", "2"});
    const std::string other = hostile_name(random_) + ".other";
    const std::vector<std::vector<std::string>> mistakes = {
        {"ds-train", other},
        {"ds-train", "cfg.json", "--out", other + "/x", "--resume", "latest"},
        {"ds-train", "cfg.json", "--weights", other},
        {"ds-train", "cfg.json", "--steps", other},
        {"ds-train", "--" + other},
        {"ds-shard", other, "-o", "x"},
        {"ds-shard", "show", "run", "--tag", other},
        {"ds-ckpt-merge", "run", "-o", other},
        {"ds-ckpt-merge", "run", "-o", "x.h5", "--only", other},
        {"ds-ckpt-merge", "run", "-o", "x", "--max-shard-size", other},
        {"ds-memreport", other},
        {"ds-memreport", "cfg.json", "--gpu", other},
        {"ds-commbench", "--op", other, "--ranks", "1"},
        {"ds-commbench", "-b", other},
        {"ds-launch", other},
        {"ds-launch", "--dry-run", "sh", "-c", other},
        {"ds-launch", "--host", other, "--dry-run", "true"},
        {"ds-launch", "--bind", other, "true"},
    };
    check(mistakes[below(random_, mistakes.size())]);
    if (i % 2 == 0) check(mistakes[static_cast<size_t>(i / 2) % mistakes.size()]);
    const std::string value = hostile(random_, 1000);
    for (const char* variable : {"DS_ISA", "RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "DS_COLUMNS", "TERM"}) {
      extra_ = {fmt::format("{}={}", variable, value)};
      if (below(random_, 3) == 0) check({"ds-train", "cfg.json", "--check"});
    }
    extra_.clear();
  }
  EXPECT_GT(done_, 10);
}

}  // namespace foreign_text_fuzz_test
}  // namespace ds
