// SPDX-License-Identifier: Apache-2.0
// How long it takes to write and to open the view of a step, model.h5, that many ranks saved.
//
//   view_bench [RANKS [LAYERS [HIDDEN]]]      default: 64 ranks, 83 layers of GPT-2 (1000 tensors), hidden size 256
//
// Opens it as any program does, through the HDF5 library: the file alone, then every dataset's shape and type, then all
// of its elements; beside them the same elements out of one merged file.

#include <hdf5.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "checkpoint/checkpoint.h"
#include "comm/make_communicator.h"
#include "ds/checkpoint.h"
#include "model/models.h"
#include "zero/layout.h"

namespace {

using namespace ds;
namespace fs = std::filesystem;

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Visit {
  bool read;
  i64 datasets = 0, elements = 0;
};
herr_t visit(hid_t file, const char* name, const H5O_info_t* info, void* data) {
  auto& v = *static_cast<Visit*>(data);
  if (info->type != H5O_TYPE_DATASET) return 0;
  const hid_t set = H5Dopen2(file, name, H5P_DEFAULT), space = H5Dget_space(set);
  const hssize_t n = H5Sget_simple_extent_npoints(space);
  ++v.datasets;
  v.elements += n;
  if (v.read) {
    std::vector<float> out(static_cast<size_t>(n));
    if (H5Dread(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.data()) < 0) std::abort();
  }
  H5Sclose(space);
  H5Dclose(set);
  return 0;
}

void open_file(const std::string& path) {
  hid_t file = -1;
  Visit shapes{.read = false}, all{.read = true};
  const double open_s = seconds([&] { file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT); });
  if (file < 0) std::abort();
  const double list_s = seconds([&] { H5Ovisit2(file, H5_INDEX_NAME, H5_ITER_INC, visit, &shapes, H5O_INFO_BASIC); });
  H5Fclose(file);
  file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const double read_s = seconds([&] { H5Ovisit2(file, H5_INDEX_NAME, H5_ITER_INC, visit, &all, H5O_INFO_BASIC); });
  H5Fclose(file);
  std::printf("%-18s %9lld bytes  open %7.2f ms  %lld datasets' shapes %8.1f ms  %.1f million elements %8.1f ms\n",
              fs::path(path).filename().c_str(), static_cast<long long>(fs::file_size(path)), open_s * 1e3,
              static_cast<long long>(shapes.datasets), list_s * 1e3, static_cast<double>(all.elements) / 1e6,
              read_s * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int ranks = argument(1, 64);
  ModelConfig config;
  config.family = Family::Gpt2;
  config.vocab_size = 1024;
  config.layers = argument(2, 83);
  config.hidden = argument(3, 256);
  config.heads = config.kv_heads = 4;
  config.head_dim = config.hidden / 4;
  config.intermediate = 4 * config.hidden;
  config.max_positions = 64;
  const model::Model model = model::make_model(config, 64);
  std::vector<std::span<const model::ParamRow>> units;
  std::vector<ParamEntry> params;
  units.emplace_back(model.shared);
  for (const auto& layer : model.layers) units.emplace_back(layer->rows());
  for (const model::ParamRow* row : model.params()) params.push_back({row->name, row->shape, "", {}});
  const zero::Layout layout = zero::Layout::make(units, {.num_ranks = ranks, .stage = 2});

  const std::string dir = fs::temp_directory_path() / fmt::format("view-bench-{}", ::getpid());
  std::string step;
  size_t pieces = 0;
  for (int r = 0; r < ranks; ++r) pieces += layout.owned_pieces(r).size();
  const double save_s = seconds([&] {
    run_threads(ranks, {}, [&](Communicator& comm) {
      std::vector<StatePiece> mine;
      std::vector<std::vector<float>> values;
      for (const zero::Piece& p : layout.owned_pieces(comm.rank())) {
        float* at = values.emplace_back(static_cast<size_t>(p.count), 0.5f).data();
        mine.push_back({p.param, p.begin, p.count, at, nullptr, at, at});
      }
      CheckpointMeta meta;
      meta.step = 1;
      meta.layout_id = layout.id();
      const std::string path = save_checkpoint(dir, meta, params, mine, comm);
      if (comm.rank() == 0) step = path;
    });
  });
  std::printf("%d ranks, %zu tensors in %zu pieces: saved in %.2f s by as many threads\n", ranks, params.size(), pieces,
              save_s);
  const std::string merged = dir + "/merged.h5";
  merge_checkpoint(step, merged, {.format = "hdf5"});
  open_file(step + "/model.h5");
  open_file(merged);
  fs::remove_all(dir);
}
