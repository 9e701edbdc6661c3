// SPDX-License-Identifier: Apache-2.0
// Logits of a model for the scripts beside this, which compare them with another framework's.
//
//   dump_logits MODEL WEIGHTS IDS B T OUT [fp32|bf16|fp16]
//
// MODEL is a config.json or its directory, WEIGHTS what ds-train takes for --weights, IDS a file of int32 [B,T] in the
// machine's order. OUT gets fp32 [B,T,V]. One rank, on the CPU.

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "comm/make_communicator.h"
#include "ds/log.h"
#include "engine/engine.h"
#include "run/weights.h"

namespace ds {
namespace {

int dump(char** argv) {
  set_log_sink([](LogLevel level, std::string_view text) {
    if (level == LogLevel::Warning) std::fprintf(stderr, "%.*s\n", static_cast<int>(text.size()), text.data());
  });
  Config c;
  c.model = load_model_config(argv[1]);
  const i64 B = std::stoll(argv[4]), T = std::stoll(argv[5]);
  c.batch = {.train = B, .micro = B, .accumulation = 1};
  c.data.seq_length = T;
  c.bf16.enabled = argv[7] != nullptr && std::strcmp(argv[7], "bf16") == 0;
  c.fp16.enabled = argv[7] != nullptr && std::strcmp(argv[7], "fp16") == 0;
  c.communication_data_type = wire_type_of(c.work_dtype());

  std::ifstream in(argv[3], std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  DS_CHECK(bytes.size() == static_cast<size_t>(B * T) * 4, Errc::Config, "{} has {} bytes, not {} x {} x 4", argv[3],
           bytes.size(), B, T);
  const auto device = make_cpu_device(*cpu_ops(), 2);
  Mesh mesh(make_self_communicator({}));
  MemoryLedger ledger;
  engine::Engine engine(c, mesh, ledger, *device);
  run::load_weights(engine, argv[2]);
  engine.evaluate(1, [&](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
    std::memcpy(ids.data(), bytes.data(), bytes.size());
    std::fill(targets.begin(), targets.end(), 0);
    return true;
  });
  std::vector<float> logits;
  engine.read_logits(logits);
  std::ofstream out(argv[6], std::ios::binary);
  out.write(reinterpret_cast<const char*>(logits.data()), static_cast<std::streamsize>(logits.size() * sizeof(float)));
  DS_CHECK(out.flush().good(), Errc::Io, "cannot write {}", argv[6]);
  return 0;
}

}  // namespace
}  // namespace ds

int main(int argc, char** argv) {
  if (argc != 7 && argc != 8) {
    std::fputs("usage: dump_logits MODEL WEIGHTS IDS B T OUT [fp32|bf16|fp16]\n", stderr);
    return 2;
  }
  try {
    return ds::dump(argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "dump_logits: error: %s\n", e.what());
    return 1;
  }
}
