// SPDX-License-Identifier: Apache-2.0
#include "zero/matrix_exchange.h"

#include <algorithm>

#include "comm/message_tag.h"

namespace ds::zero {

bool cuts_matrices(const model::ParamRow& row) noexcept {
  return !row.slice.whole() && row.slice.dim + 2 >= std::ssize(row.whole_shape());
}

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
    const model::MatrixShape own = row.matrices(), whole = model::MatrixShape::of(row.whole_shape());
    const i64 elems = own.rows * own.cols;
    DS_ASSERT(own.count > 0);
    for (i64 e = 0; e < own.count; ++e) {
      MatrixPlace& place = places.emplace_back(MatrixPlace{.param = param,
                                                           .rows = whole.rows,
                                                           .cols = whole.cols,
                                                           .begin = e * elems,
                                                           .slice_elems = elems,
                                                           .sliced = cuts_matrices(row),
                                                           .batch_dims = narrow<int>(std::ssize(row.shape)) - 2});
      if (!layout.states().shard_optimizer || P == 1) continue;
      const i64 slice = layout.segments()[at.segment].slice;
      for (i64 begin = place.begin; begin < place.begin + elems;) {
        const i64 rank = (at.offset + begin) / slice,
                  end = std::min(place.begin + elems, (rank + 1) * slice - at.offset);
        place.parts.push_back({narrow<int>(rank), begin, end - begin});
        begin = end;
      }
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
    if (p.sliced || p.owner >= 0) m.whole = std::max(m.whole, p.rows * p.cols);
    if (p.sliced) m.slices = std::max(m.slices, tp * p.slice_elems);
  }
  return m;
}

namespace {

// Whether slices of a dim of `size` indices are together all of it.
bool cover(std::span<const model::ParamSlice> slices, i64 size) {
  std::vector<std::pair<i64, i64>> ranges;
  for (const model::ParamSlice& slice : slices) {
    if (slice.whole()) return true;
    ranges.insert(ranges.end(), slice.ranges.begin(), slice.ranges.end());
  }
  std::ranges::sort(ranges);
  i64 end = 0;
  for (const auto& [first, last] : ranges) {
    if (first > end) return false;
    end = std::max(end, last);
  }
  return end == size;
}

}  // namespace

MatrixExchange::MatrixExchange(std::span<const MatrixPlace> places,
                               const std::vector<std::vector<model::ParamSlice>>& slices, Communicator& group,
                               std::string_view name, Communicator& tp, float* whole, float* gathered)
    : places_(places),
      slices_(places.size()),
      group_(group),
      tp_(tp),
      send_tag_(message_text(name, Collective::Send)),
      recv_tag_(message_text(name, Collective::Recv)),
      whole_(whole),
      gathered_(gathered) {
  for (size_t i = 0; i < places.size(); ++i) {
    if (!places[i].sliced) continue;
    DS_ASSERT(!slices[i].empty());
    const std::vector<i64> shape = {places[i].rows, places[i].cols};
    std::vector<model::ParamSlice> of_matrix;
    for (const model::ParamSlice& slice : slices[i])
      of_matrix.push_back(slice.whole() ? slice : model::ParamSlice{slice.dim - places[i].batch_dims, slice.ranges});
    DS_CHECK(cover(of_matrix, shape[static_cast<size_t>(of_matrix.front().dim)]), Errc::Config,
             "ranks of {} and tp have parts of a matrix that are together not all of it", name);
    for (const model::ParamSlice& slice : of_matrix) slices_[i].emplace_back(slice, shape);
  }
}

void MatrixExchange::for_each(Elements elements, Copy copy, Body body) {
  const int me = group_.rank();
  const auto of_mine = [&](const MatrixPlace& place, auto&& visit) {
    if (place.owner < 0 || place.owner == me) return;
    for (const MatrixPlace::Part& part : place.parts) {
      if (part.rank == me) visit(part);
    }
  };
  for (size_t first = 0; first < places_.size(); first += static_cast<size_t>(group_.size())) {
    const size_t last = std::min(places_.size(), first + static_cast<size_t>(group_.size()));
    const auto wave = places_.subspan(first, last - first);
    sent_.clear();
    returned_.clear();
    for (const MatrixPlace& place : wave) {
      of_mine(place, [&](const MatrixPlace::Part& part) {
        sent_.push_back(group_.send(elements(place.param, part.begin), part.count * 4, place.owner, send_tag_));
      });
    }
    for (size_t i = first; i < last; ++i) {
      if (places_[i].owner < 0 || places_[i].owner == me) change(i, elements, copy, body);
    }
    for (Ticket& ticket : sent_) ticket.wait();  // pieces come back to the same memory
    for (const MatrixPlace& place : wave) {
      of_mine(place, [&](const MatrixPlace::Part& part) {
        group_.recv(elements(place.param, part.begin), part.count * 4, place.owner, recv_tag_).wait();
      });
    }
    for (Ticket& ticket : returned_) ticket.wait();  // before another matrix uses the memory
  }
}

void MatrixExchange::change(size_t i, Elements elements, Copy copy, Body body) {
  const MatrixPlace& place = places_[i];
  const bool sliced = place.sliced, here = place.owner < 0;
  float* const slice = sliced ? gathered_ + tp_.rank() * place.slice_elems
                       : here ? elements(place.param, place.begin)
                              : whole_;
  if (here) {
    if (sliced) copy(slice, elements(place.param, place.begin), place.slice_elems * 4);
  } else {
    for (const MatrixPlace::Part& part : place.parts) {
      if (part.rank == group_.rank()) {
        copy(slice + (part.begin - place.begin), elements(place.param, part.begin), part.count * 4);
      } else {
        group_.recv(slice + (part.begin - place.begin), part.count * 4, part.rank, recv_tag_).wait();
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
    if (sliced) copy(elements(place.param, place.begin), slice, place.slice_elems * 4);
    return;
  }
  for (const MatrixPlace::Part& part : place.parts) {
    if (part.rank == group_.rank()) {
      copy(elements(place.param, part.begin), slice + (part.begin - place.begin), part.count * 4);
    } else {
      returned_.push_back(group_.send(slice + (part.begin - place.begin), part.count * 4, part.rank, send_tag_));
    }
  }
}

}  // namespace ds::zero
