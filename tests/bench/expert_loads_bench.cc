// SPDX-License-Identifier: Apache-2.0
// A layer of experts over two ranks of ep, forward and backward, with loads that a real router makes at times:
// expert_loads_bench [TURNS [SHAPE [DTYPE]]]. The kinds of loads are those of Megatron-Core's benchmark of token
// imbalance (NVIDIA/Megatron-LM#7488), with numbers of our own. Each rank is a thread with a core of its own, and its
// messages go through memory. Loads take turns; a line shows the median milliseconds of the slowest rank for a pass,
// their ratio to the balanced load, and the rows of the busiest rank beside the mean: the ratio that products of these
// rows alone would have. `messages` are the exchanges of a pass without products: rows to the experts and back.

#include <array>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "bench/expert_layer.h"
#include "comm/make_communicator.h"

using namespace ds;
using namespace ds::bench;

namespace {

constexpr int kRanks = 2;
constexpr i64 kBurst = 4;  // a turn of so many has the load of W2

struct Load {
  const char* name;
  const char* meaning;
};
constexpr Load kLoads[] = {
    {"W0", "balanced"},
    {"W1", "an eighth of the experts, drawn at random, gets half of the choices"},
    {"W2", "that eighth is on one rank"},
    {"W3", "that eighth is spread over the ranks"},
    {"W4", "the tokens of one rank choose experts of the other alone"},
    {"W5", "the experts of one rank are not chosen"},
    {"W6", "that of W2, on another rank each turn"},
    {"W7", "balanced, and that of W2 every fourth turn"},
};

// Draws k distinct experts of a token.
class Choices {
 public:
  Choices(const ExpertShape& s, size_t load, int rank, i64 turn) : s_(s), load_(load), rank_(rank), turn_(turn) {}
  std::vector<i64> of(i64 token) {
    std::vector<i64> chosen;
    const i64 half = s_.experts / kRanks;
    const bool burst = load_ == 7 && turn_ % kBurst == 0;
    const auto fill = [&](i64 count, auto&& allowed) {
      while (std::ssize(chosen) < count) {
        const i64 e = draw(token);
        if (allowed(e) && std::ranges::find(chosen, e) == chosen.end()) chosen.push_back(e);
      }
    };
    if (load_ == 0 || (load_ == 7 && !burst) || (load_ == 4 && rank_ == 1)) {
      for (i64 j = 0; j < s_.chosen; ++j) chosen.push_back((token * s_.chosen + j) % s_.experts);
    } else if (load_ == 4) {
      fill(s_.chosen, [&](i64 e) { return e >= half; });
    } else if (load_ == 5) {
      fill(s_.chosen, [&](i64 e) { return e < half; });
    } else {
      fill(s_.chosen / 2, [&](i64 e) { return hot(e); });
      fill(s_.chosen, [&](i64 e) { return !hot(e); });
    }
    return chosen;
  }

 private:
  i64 draw(i64 token) {
    const RngKey key{7, static_cast<u32>(rank_), 0};
    return static_cast<i64>(key.bits(static_cast<u64>(token * 4096 + drawn_++ % 4096)) % static_cast<u64>(s_.experts));
  }
  bool hot(i64 e) const {
    const i64 n = s_.experts / 8;
    if (load_ == 1) return e * 37 % s_.experts < n;  // 37 is odd, so this is a permutation of 2^n experts
    if (load_ == 3) return e % 8 == 0;
    const i64 begin = load_ == 6 && turn_ % kRanks == 1 ? s_.experts - n : 0;
    return e >= begin && e < begin + n;
  }

  const ExpertShape& s_;
  size_t load_;
  int rank_;
  i64 turn_, drawn_ = 0;
};

// Inputs for which the router, whose row e is the e-th unit vector, makes these choices.
void set_choices(ExpertLayer& layer, const ExpertShape& s, size_t load, int rank, i64 turn) {
  const TensorView x = layer.x();
  Choices choices(s, load, rank, turn);
  for (i64 t = 0; t < s.tokens; ++t) {
    for (i64 e = 0; e < s.experts; ++e) put(x, t * s.hidden + e, 0.01f * static_cast<float>((t + e) % 7));
    for (const i64 e : choices.of(t)) put(x, t * s.hidden + e, 2 + 0.01f * static_cast<float>(e % 5));
  }
}

// The messages of a forward pass: counts, rows to the experts, and back.
class Messages {
 public:
  Messages(const ExpertShape& s, DType work, const model::Shard& shard, Stream& stream, Communicator& comm)
      : exchange_(s.experts, s.chosen, shard.expert_room, shard),
        sorted_(work, {s.choices(), s.hidden}),
        arrived_(work, {exchange_.most_rows(s.tokens), s.hidden}),
        all_(static_cast<size_t>(kRanks * (s.experts + 1))),
        groups_(static_cast<size_t>(exchange_.groups() + 1)),
        ctx_{.ops = *cpu_ops(), .stream = stream, .B = 1, .T = s.tokens} {
    ctx_.groups.shard = shard;
    ctx_.groups.comms[Axis::Ep] = &comm;
    ctx_.host = &host_;
  }
  void pass(std::span<const float> rows_of_experts) {
    const TensorView all = TensorView::of(all_.data(), DType::I32, {kRanks, std::ssize(all_) / kRanks}),
                     groups = TensorView::of(groups_.data(), DType::I32, {std::ssize(groups_)});
    i32* const own = exchange_.own_offsets(all).as<i32>();
    for (i64 e = 0; e < all.dim(1) - 1; ++e)
      own[e + 1] = own[e] + static_cast<i32>(rows_of_experts[static_cast<size_t>(e)]);
    exchange_.agree(ctx_, all);
    for (i64 round = 0; round < exchange_.rounds(); ++round) {
      exchange_.begin(ctx_, groups, round);
      exchange_.start_to_experts(ctx_, arrived_.view, sorted_.view).wait();
      exchange_.from_experts(ctx_, sorted_.view, arrived_.view);
    }
  }

 private:
  model::ExpertExchange exchange_;
  Tensor sorted_, arrived_;
  std::vector<i32> all_, groups_;
  SameMemory host_;
  model::PassContext ctx_;
};

void measure(const ExpertShape& s, DType work, int turns) {
  constexpr size_t kNum = std::size(kLoads);
  struct Times {
    std::vector<double> pass, messages;
    double busiest = 0;  // rows of a rank, of the mean
  };
  std::array<Times, kNum> times;
  i64 rounds = 0;
  run_threads(kRanks, {}, [&](Communicator& comm) {
    ThreadPool pool(1);
    Stream stream{.pool = &pool};
    const model::Shard shard{.ep = kRanks, .ep_rank = comm.rank(), .expert_room = 2};
    ExpertLayer layer(*cpu_ops(), stream, s, work, shard, &comm);
    Messages alone(s, work, shard, stream, comm);
    const TensorView router = layer.router();
    for (i64 i = 0; i < router.numel(); ++i) put(router, i, i % s.hidden == i / s.hidden ? 4.0f : 0.0f);
    for (i64 turn = 0; turn <= turns; ++turn) {
      for (size_t load = 0; load < kNum; ++load) {
        set_choices(layer, s, load, comm.rank(), turn);
        comm.barrier("bench");
        const double pass = seconds([&] { layer.forward(), layer.backward(); });
        comm.barrier("bench");
        const double messages = seconds([&] { alone.pass(layer.tokens_of_experts()); });
        std::array<double, 2> slowest = {pass, messages};
        comm.all_reduce(slowest.data(), 2, DType::F64, ReduceOp::Max, "bench").wait();
        std::vector<float> rows(layer.tokens_of_experts().begin(), layer.tokens_of_experts().begin() + s.experts);
        comm.all_reduce(rows.data(), s.experts, DType::F32, ReduceOp::Sum, "bench").wait();
        if (comm.rank() > 0 || turn == 0) continue;
        const auto half = rows.begin() + s.experts / kRanks;
        const float first = std::accumulate(rows.begin(), half, 0.0f), second = std::accumulate(half, rows.end(), 0.0f);
        Times& t = times[load];
        t.pass.push_back(slowest[0]), t.messages.push_back(slowest[1]);
        t.busiest += double{std::max(first, second)} / double{first + second} * kRanks / turns;
      }
    }
    if (comm.rank() == 0) rounds = layer.rounds();
  });
  std::printf("%s %s, %lld tokens a rank, room for twice the rows of an even load, %lld further rounds\n", s.name,
              std::string(dtype_name(work)).c_str(), static_cast<long long>(s.tokens), static_cast<long long>(rounds));
  for (size_t load = 0; load < kNum; ++load) {
    const Times& t = times[load];
    std::printf("%s %8.1f ms %5.2f  rows %4.2f  messages %6.1f ms  worst turn %8.1f ms  %s\n", kLoads[load].name,
                median(t.pass) * 1e3, median(t.pass) / median(times[0].pass), t.busiest, median(t.messages) * 1e3,
                *std::ranges::max_element(t.pass) * 1e3, kLoads[load].meaning);
  }
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int turns = argc > 1 ? std::atoi(argv[1]) : 8;
  const std::string only = argc > 2 ? argv[2] : "", dtype = argc > 3 ? argv[3] : "";
  for (const ExpertShape& shape : kExpertShapes) {
    if (!only.empty() && only != shape.name) continue;
    for (const DType work : {DType::F32, DType::BF16}) {
      if (dtype.empty() || dtype == dtype_name(work)) measure(shape, work, turns);
    }
  }
  return 0;
}
