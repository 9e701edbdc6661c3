// SPDX-License-Identifier: Apache-2.0
// Shapes and places that layers and the code around them agree on: parameters as matrices, ranks by axis, memory for
// products over fewer or more rows than the micro-batch has; and that whole matrices are gathered by these rules.

#include <gtest/gtest.h>

#include <mutex>
#include <numeric>
#include <thread>

#include "comm/make_communicator.h"
#include "comm/message_tag.h"
#include "mesh/mesh.h"
#include "model/models.h"
#include "model/pass_memory.h"
#include "zero/matrix_exchange.h"

namespace ds {
namespace layer_test {

model::ParamRow row_of(std::vector<i64> shape) { return {.name = "row", .shape = std::move(shape)}; }

TEST(ParamRow, IsSeenAsAVectorAMatrixOrABatchOfMatrices) {
  struct Case {
    std::vector<i64> shape, view;
    std::array<i64, 3> matrices;  // count, rows, columns
  };
  float there = 0;
  for (const Case& c : {Case{{7}, {7}, {0, 0, 0}},
                        {{5, 7}, {5, 7}, {1, 5, 7}},
                        {{3, 5, 7}, {3, 5, 7}, {3, 5, 7}},
                        {{1, 5, 7}, {1, 5, 7}, {1, 5, 7}},
                        {{2, 3, 5, 7}, {6, 5, 7}, {6, 5, 7}}}) {
    const model::ParamRow row = row_of(c.shape);
    const TensorView view = row.view(DType::BF16, &there);
    EXPECT_EQ(std::vector<i64>(view.shape.begin(), view.shape.begin() + view.rank), c.view);
    EXPECT_EQ(view.data, &there);
    EXPECT_EQ(view.dtype, DType::BF16);
    EXPECT_TRUE(view.contiguous());
    EXPECT_EQ(view.numel(), row.numel());
    const model::MatrixShape m = row.matrices();
    EXPECT_EQ((std::array{m.count, m.rows, m.cols}), c.matrices);
  }
}

TEST(ParamRow, HasPartsOfMatricesOrSomeOfABatch) {
  model::ParamRow row = row_of({1, 5, 7});
  EXPECT_FALSE(zero::cuts_matrices(row));
  row.whole = {4, 5, 7};
  row.slice = {0, {{2, 3}}};
  EXPECT_FALSE(zero::cuts_matrices(row));
  for (const int dim : {1, 2}) {
    row.slice = {dim, {{0, 2}}};
    EXPECT_TRUE(zero::cuts_matrices(row)) << dim;
  }
  row.whole = {8, 7};
  row.slice = {0, {{0, 2}}};
  EXPECT_TRUE(zero::cuts_matrices(row));
}

TEST(Shard, HasAPlaceAlongEachAxisOfLayers) {
  const model::Shard shard{.tp = 4, .tp_rank = 3, .sp = 2, .sp_rank = 1, .ep = 8, .ep_rank = 5};
  EXPECT_EQ(shard.size(Axis::Tp), 4);
  EXPECT_EQ(shard.rank(Axis::Tp), 3);
  EXPECT_EQ(shard.size(Axis::Sp), 2);
  EXPECT_EQ(shard.rank(Axis::Sp), 1);
  EXPECT_EQ(shard.size(Axis::Ep), 8);
  EXPECT_EQ(shard.rank(Axis::Ep), 5);
  EXPECT_EQ(shard.size(Axis::Pp), 1);  // over which no layer communicates
  EXPECT_EQ(shard.rank(Axis::Pp), 0);
  EXPECT_TRUE(model::Shard().alone());
  for (const model::LayerAxis& axis : model::kLayerAxes) {
    model::Shard two;
    two.*axis.size = 2;
    EXPECT_FALSE(two.alone()) << axis_name(axis.axis);
  }
}

// A split of dp with the name of an axis is that axis.
TEST(Groups, FindCommunicatorsByAxis) {
  const DpSplit experts{std::string(axis_name(Axis::Ep)), 2, DpSplit::Along::Inner};
  std::vector<std::thread> ranks;
  for (auto& world : make_thread_communicators(8, {.timeout_s = 60})) {
    ranks.emplace_back([&, mine = std::move(world)]() mutable {
      const int rank = mine->rank();
      const Mesh mesh(std::move(mine), {.dp = 4, .tp = 2}, {.timeout_s = 60}, {}, {experts});
      model::Groups groups{.comms = mesh.by_axis()};
      EXPECT_EQ(&groups[Axis::Tp], &mesh.tp());
      EXPECT_EQ(&groups[Axis::Sp], &mesh.sp());
      EXPECT_EQ(&groups[Axis::Ep], mesh.split("ep"));
      EXPECT_EQ(groups[Axis::Ep].size(), 2);
      EXPECT_EQ(groups[Axis::Ep].rank(), rank / 2 % 2);
    });
  }
  for (std::thread& t : ranks) t.join();
  const Mesh without(make_self_communicator({}));
  EXPECT_EQ(without.by_axis()[Axis::Ep], nullptr);
  EXPECT_EQ(&model::Groups{.comms = without.by_axis()}[Axis::Tp], &without.tp());
  EXPECT_THROW((void)model::Groups{.comms = without.by_axis()}[Axis::Ep], Error);
}

// The layer `of` with products of more rows.
class Wide final : public model::Layer {
 public:
  explicit Wide(i64 times) : Layer("wide"), times_(times) {}
  std::string_view type() const noexcept override { return "Wide"; }
  i64 product_rows(i64 R) const noexcept override { return times_ * R; }
  bool adds_loss() const noexcept override { return true; }
  i64 num_counts() const noexcept override { return 7; }
  i64 num_step_counts() const noexcept override { return times_; }
  model::LayerActs plan(model::ActivationPlanner&, const model::PlannedPass&) const override { return {}; }
  void forward(const model::PassContext&, model::RowViews, TensorView, const model::LayerActs&) const override {}
  void backward_input(const model::PassContext&, model::RowViews, TensorView, TensorView,
                      const model::LayerActs&) const override {}
  void backward_weight(const model::PassContext&, model::RowViews, TensorView, TensorView,
                       const model::LayerActs&) const override {}

 private:
  i64 times_;
};

TEST(Groups, AreOverFewerOrMoreRowsThanTheMicroBatch) {
  model::Model model;
  model.hidden = 10;
  model.vocab = 7;
  model.shard.tp = 4;
  const auto memory_of = [&] {
    model::PassMemory memory(model, {.B = 2, .T = 3, .sequence_length = 3, .gradients = true, .tile_cols = 5});
    static std::array<float, 1024> there;
    memory.for_each([](Tag, TensorView& v) { v.data = v.rank > 0 ? there.data() : nullptr; });
    return memory;
  };
  Stream stream;
  const auto context = [&](const model::PassMemory& memory) {
    return model::make_context(memory, {.B = 2, .T = 3}, model, no_ops(), stream, {});
  };
  const model::PassMemory narrow = memory_of();
  EXPECT_EQ(narrow.partial.dim(0), 8);
  EXPECT_EQ(narrow.tile_sum.dim(0), 6);
  EXPECT_FALSE(narrow.aux_loss || narrow.aux_grad);
  EXPECT_THROW((void)context(narrow).over(1, 7), Error);

  for (const i64 times : {2, 3}) model.layers.push_back(std::make_unique<Wide>(times));
  EXPECT_EQ(model.product_rows(6), 18);
  EXPECT_EQ(model.num_aux_losses(), 2);
  EXPECT_EQ(model.aux_losses_before(1), 1);
  const model::PassMemory wide = memory_of();
  EXPECT_EQ(wide.tile_sum.dim(0), 18);
  EXPECT_EQ(wide.aux_loss.numel(), 1);
  const model::PassContext all = context(wide);
  EXPECT_EQ(all.aux_loss.data, wide.aux_loss.data);
  EXPECT_FALSE(
      model::make_context(wide, {.mode = model::Mode::Eval, .B = 2, .T = 3}, model, no_ops(), stream, {}).aux_loss);
  EXPECT_EQ(wide.step_counts.numel(), 2 + 3);
  const model::PassContext of_last = model::forward_context(all, model, 1, false);
  EXPECT_EQ(of_last.step_counts.numel(), 3);
  EXPECT_EQ(of_last.step_counts.data, wide.step_counts.as<float>() + 2);
  EXPECT_EQ(of_last.counts.data, wide.counts.data);
  const model::PassContext again = model::forward_context(all, model, 1, true);
  EXPECT_FALSE(again.counts || again.step_counts);
  const auto rows = [](const model::PassContext& ctx) {
    return std::array{ctx.B, ctx.T, ctx.groups.partial.dim(0), ctx.groups.gathered.dim(0), ctx.groups.sum.dim(0)};
  };
  EXPECT_EQ(rows(all), (std::array<i64, 5>{2, 3, 8, 8, 2}));
  EXPECT_EQ(rows(all.over(2, 1)), (std::array<i64, 5>{2, 1, 4, 4, 1}));
  EXPECT_EQ(rows(all.over(1, 18)), (std::array<i64, 5>{1, 18, 20, 20, 5}));
  EXPECT_EQ(rows(all.over(2, 1).over(1, 18)), rows(all.over(1, 18)));
  EXPECT_THROW((void)all.over(1, 19), Error);
}

// Elements of every matrix are numbered; each rank of dp changes those that it has gathered, and pieces come back.
class Exchange {
 public:
  Exchange(std::vector<model::ParamRow> rows, const std::vector<std::vector<model::ParamSlice>>& slices_of_tp,
           int stage, Communicator& dp, Communicator& tp)
      : rows_(std::move(rows)), unit_(rows_) {
    layout_ = zero::Layout::make({&unit_, 1}, {.num_ranks = dp.size(), .stage = stage});
    std::vector<i64> params(rows_.size());
    std::iota(params.begin(), params.end(), 0);
    places_ = zero::plan_matrices(layout_, {&unit_, 1}, params);
    const zero::MatrixMemory memory = zero::matrix_memory(places_, tp.size());
    whole_.resize(static_cast<size_t>(memory.whole));
    gathered_.resize(static_cast<size_t>(memory.slices));
    std::vector<std::vector<model::ParamSlice>> slices(places_.size());
    for (size_t i = 0; i < places_.size(); ++i) {
      for (const auto& of_rank : slices_of_tp) slices[i].push_back(of_rank[places_[i].param]);
    }
    exchange_.emplace(places_, slices, dp, "dp", tp, whole_.data(), gathered_.data());
    for (const model::ParamRow& row : rows_) {
      std::vector<float>& values = values_.emplace_back();
      const model::SliceMap map(row.slice, row.whole_shape());
      for (i64 i = 0; i < row.numel(); ++i) values.push_back(static_cast<float>(map.global_of(i)));
    }
  }
  const std::vector<zero::MatrixPlace>& places() const { return places_; }
  // Adds to each element its place in its matrix, times 1000.
  void run() {
    exchange_->for_each([&](i64 param, i64 begin) { return values_[param].data() + begin; },
                        [](void* to, const void* from, i64 n) { std::memmove(to, from, static_cast<size_t>(n)); },
                        [](TensorView whole) {
                          ASSERT_EQ(whole.rank, 2);
                          for (i64 i = 0; i < whole.numel(); ++i)
                            whole.as<float>()[i] += 1000.0f * static_cast<float>(i);
                        });
  }
  // Checks that the elements that this rank owns have been changed.
  void check(int rank) const {
    for (const zero::Piece& piece : layout_.held_pieces(rank)) {
      const model::ParamRow& row = rows_[piece.param];
      const model::SliceMap map(row.slice, row.whole_shape());
      const model::MatrixShape m = model::MatrixShape::of(row.whole_shape());
      for (i64 i = piece.begin; i < piece.begin + piece.count; ++i) {
        const i64 global = map.global_of(i);
        ASSERT_EQ(values_[piece.param][i], static_cast<float>(global + 1000 * (global % (m.rows * m.cols))))
            << row.name << " " << i;
      }
    }
  }

 private:
  std::vector<model::ParamRow> rows_;
  std::span<const model::ParamRow> unit_;
  zero::Layout layout_;
  std::vector<zero::MatrixPlace> places_;
  std::vector<float> whole_, gathered_;
  std::optional<zero::MatrixExchange> exchange_;
  std::vector<std::vector<float>> values_;
};

TEST(MatrixExchange, ChangesEachMatrixOfABatch) {
  // One matrix, cut along its columns; a batch of three, cut along either dim of its matrices; a batch of which both
  // ranks of tp have all, and one of which each has some.
  const auto rows_of = [](int tp_rank) {
    const auto cut = [&](std::vector<i64> shape, int dim) {
      model::ParamRow row = row_of(shape);
      row.whole = shape;
      const i64 half = shape[static_cast<size_t>(dim)] / 2;
      row.shape[static_cast<size_t>(dim)] = half;
      row.slice = {dim, {{tp_rank * half, (tp_rank + 1) * half}}};
      return row;
    };
    return std::vector{cut({6, 10}, 1), cut({3, 4, 6}, 1), cut({3, 4, 6}, 2), row_of({2, 5, 7}), cut({4, 5, 3}, 0)};
  };
  std::vector<std::vector<model::ParamSlice>> slices;
  for (const int tp_rank : {0, 1}) {
    std::vector<model::ParamSlice>& of_rank = slices.emplace_back();
    for (const model::ParamRow& row : rows_of(tp_rank)) of_rank.push_back(row.slice);
  }
  for (const int stage : {0, 1}) {
    std::vector<std::thread> ranks;
    for (auto& world : make_thread_communicators(6, {.timeout_s = 60})) {
      ranks.emplace_back([&, mine = std::move(world)]() mutable {
        const Mesh mesh(std::move(mine), {.dp = 3, .tp = 2}, {.timeout_s = 60});
        Exchange exchange(rows_of(mesh.coord().tp), slices, stage, mesh.dp(), mesh.tp());
        EXPECT_EQ(exchange.places().size(), 1u + 3 + 3 + 2 + 2);
        EXPECT_EQ(exchange.places().front().param, 0);  // the largest
        exchange.run();
        exchange.check(mesh.coord().dp);
      });
    }
    for (std::thread& t : ranks) t.join();
  }
}

// Parts that leave a gap would be taken for a whole.
TEST(MatrixExchange, RefusesPartsOfAMatrix) {
  model::ParamRow row = row_of({2, 10});
  row.whole = {6, 10};
  row.slice = {0, {{0, 2}}};
  const auto alone = make_self_communicator({});
  const auto slices = [](i64 end) {
    return std::vector<std::vector<model::ParamSlice>>{{{0, {{0, 2}}}}, {{0, {{2, end}}}}};
  };
  EXPECT_NO_THROW(Exchange({row}, slices(6), 0, *alone, *alone));
  EXPECT_THROW(Exchange({row}, slices(5), 0, *alone, *alone), Error);
}

}  // namespace layer_test
}  // namespace ds
