// SPDX-License-Identifier: Apache-2.0
#include "zero/matrix_exchange.h"

#include "comm/message_tag.h"

#include <algorithm>

namespace ds::zero {

std::vector<MatrixPlace> plan_matrices(const Layout& layout, std::span<const std::span<const model::ParamRow>> units,
                                       std::span<const i64> params) {
  std::vector<const model::ParamRow*> rows;
  for (const auto& unit : units) {
    for (const model::ParamRow& row : unit) rows.push_back(&row);
  }
  std::vector<MatrixPlace> places;
  const int P = layout.num_ranks();
  for (const i64 param : params) {
    const RowPlace& at = layout.rows()[param];
    if (at.segment < 0) continue;
    const model::ParamRow& row = *rows[param];
    DS_ASSERT(row.whole_shape().size() == 2);
    MatrixPlace& place = places.emplace_back(MatrixPlace{
        .param = param, .rows = row.whole_shape()[0], .cols = row.whole_shape()[1], .slice_elems = row.numel()});
    if (!layout.states().shard_optimizer || P == 1) continue;
    const i64 slice = layout.segments()[at.segment].slice;
    for (i64 begin = 0; begin < at.numel;) {
      const i64 rank = (at.offset + begin) / slice, end = std::min(at.numel, (rank + 1) * slice - at.offset);
      place.parts.push_back({narrow<int>(rank), begin, end - begin});
      begin = end;
    }
  }
  std::ranges::stable_sort(places, std::greater<>(), [](const MatrixPlace& p) { return p.rows * p.cols; });
  for (size_t i = 0; i < places.size(); ++i) {
    if (!places[i].parts.empty()) places[i].owner = narrow<int>(i % static_cast<size_t>(P));
  }
  return places;
}

MatrixMemory matrix_memory(std::span<const MatrixPlace> places, int tp) noexcept {
  MatrixMemory m;
  for (const MatrixPlace& p : places) {
    if (tp > 1 || p.owner >= 0) m.whole = std::max(m.whole, p.rows * p.cols);
    if (tp > 1) m.slices = std::max(m.slices, tp * p.slice_elems);
  }
  return m;
}

MatrixExchange::MatrixExchange(std::span<const MatrixPlace> places,
                               const std::vector<std::vector<model::ParamSlice>>& slices, Communicator& dp,
                               Communicator& tp, float* whole, float* gathered)
    : places_(places), slices_(places.size()), dp_(dp), tp_(tp), whole_(whole), gathered_(gathered) {
  for (size_t i = 0; i < places.size() && tp.size() > 1; ++i) {
    const std::vector<i64> shape = {places[i].rows, places[i].cols};
    for (const model::ParamSlice& slice : slices[i]) slices_[i].emplace_back(slice, shape);
  }
}

void MatrixExchange::for_each(Elements elements, Copy copy, Body body) {
  const int me = dp_.rank();
  const auto of_mine = [&](const MatrixPlace& place, auto&& visit) {
    if (place.owner < 0 || place.owner == me) return;
    for (const MatrixPlace::Part& part : place.parts) {
      if (part.rank == me) visit(part);
    }
  };
  for (size_t first = 0; first < places_.size(); first += static_cast<size_t>(dp_.size())) {
    const size_t last = std::min(places_.size(), first + static_cast<size_t>(dp_.size()));
    const auto wave = places_.subspan(first, last - first);
    sent_.clear();
    returned_.clear();
    for (const MatrixPlace& place : wave) {
      of_mine(place, [&](const MatrixPlace::Part& part) {
        sent_.push_back(dp_.send(elements(place.param, part.begin), part.count * 4, place.owner,
                                 message_text(Axis::Dp, Collective::Send)));
      });
    }
    for (size_t i = first; i < last; ++i) {
      if (places_[i].owner < 0 || places_[i].owner == me) change(i, elements, copy, body);
    }
    for (Ticket& ticket : sent_) ticket.wait();  // pieces come back to the same memory
    for (const MatrixPlace& place : wave) {
      of_mine(place, [&](const MatrixPlace::Part& part) {
        dp_.recv(elements(place.param, part.begin), part.count * 4, place.owner,
                 message_text(Axis::Dp, Collective::Recv))
            .wait();
      });
    }
    for (Ticket& ticket : returned_) ticket.wait();  // before another matrix uses the memory
  }
}

void MatrixExchange::change(size_t i, Elements elements, Copy copy, Body body) {
  const MatrixPlace& place = places_[i];
  const bool sliced = tp_.size() > 1, here = place.owner < 0;
  float* const slice = sliced ? gathered_ + tp_.rank() * place.slice_elems : here ? elements(place.param, 0) : whole_;
  if (here) {
    if (sliced) copy(slice, elements(place.param, 0), place.slice_elems * 4);
  } else {
    for (const MatrixPlace::Part& part : place.parts) {
      if (part.rank == dp_.rank()) {
        copy(slice + part.begin, elements(place.param, part.begin), part.count * 4);
      } else {
        dp_.recv(slice + part.begin, part.count * 4, part.rank, message_text(Axis::Dp, Collective::Recv)).wait();
      }
    }
  }
  const TensorView whole = TensorView::of(sliced ? whole_ : slice, DType::F32, {place.rows, place.cols});
  if (sliced) {
    const AllGatherSegment all{gathered_, place.slice_elems * 4};
    tp_.all_gather({&all, 1}, message_text(Axis::Tp, Collective::AllGather)).wait();
    for (int r = 0; r < tp_.size(); ++r) {
      const float* const from = gathered_ + r * place.slice_elems;
      slices_[i][r].for_each_run(0, place.slice_elems,
                                 [&](i64 local, i64 global, i64 n) { copy(whole_ + global, from + local, n * 4); });
    }
  }
  body(whole);
  if (sliced) {
    slices_[i][tp_.rank()].for_each_run(
        0, place.slice_elems, [&](i64 local, i64 global, i64 n) { copy(slice + local, whole_ + global, n * 4); });
  }
  if (here) {
    if (sliced) copy(elements(place.param, 0), slice, place.slice_elems * 4);
    return;
  }
  for (const MatrixPlace::Part& part : place.parts) {
    if (part.rank == dp_.rank()) {
      copy(elements(place.param, part.begin), slice + part.begin, part.count * 4);
    } else {
      returned_.push_back(
          dp_.send(slice + part.begin, part.count * 4, part.rank, message_text(Axis::Dp, Collective::Send)));
    }
  }
}

}  // namespace ds::zero
