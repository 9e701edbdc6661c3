// SPDX-License-Identifier: Apache-2.0
// Embedding lookup and gradient: repeated, missing and skewed ids, small and large tables, parts of a vocabulary.

#include "finite_difference.h"
#include "parity.h"

namespace ds::testing {
namespace embedding_test {

struct Case {
  i64 V, R, C;
};
const Case kCases[] = {{1, 1, 1}, {3, 40, 7}, {100, 60, 130}, {1500, 40, 17}, {17, 33, 4097}, {3000, 10, 40}};

// Skewed, as in text: most rows share few ids.
Tensor make_ids(i64 R, i64 V, u32 seed) {
  Tensor ids(DType::I32, {R});
  const RngKey key{seed, 3, 0};
  for (i64 r = 0; r < R; ++r) {
    const double u = static_cast<double>(RngKey::uniform(key.bits(static_cast<u64>(r))));
    ids.view().as<i32>()[r] =
        static_cast<i32>(std::min<double>(u * u * u * static_cast<double>(V), static_cast<double>(V - 1)));
  }
  ids.view().as<i32>()[R - 1] = static_cast<i32>(V - 1);
  return ids;
}

TEST(Embedding, BackendsMatchRef) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      for (auto [V, R, C] : kCases) {
        for (bool accumulate : {false, true}) {
          const std::string what = std::string(ops->name) + " " + std::string(dtype_name(t)) + " V" +
                                   std::to_string(V) + " R" + std::to_string(R) + " C" + std::to_string(C);
          const Tensor ids = make_ids(R, V, 9);
          Tensor table(t, {V, C}), y(t, {R, C}), dy(t, {R, C});
          table.randomize(1);
          y.randomize(2);
          dy.randomize(3);
          Tensor want = y;
          ref_ops().embedding_fwd(want, table, ids, 0, accumulate, s);
          const Tensor before = y;
          ops->embedding_fwd(y, table, ids, 0, accumulate, s);
          expect_same_bits(y, want, what + " forward");
          if (packs(*ops)) {
            for (const OpTable* by : {ops, &ref_ops()}) {
              Tensor from_panels = before;
              by->embedding_fwd(from_panels, InPanels(*ops, table), ids, 0, accumulate, s);
              expect_same_bits(from_panels, want, what + " from panels");
            }
          }
          for (DType grad_dtype : {DType::F32, t}) {
            Tensor got(grad_dtype, {V, C});
            got.randomize(4);
            Tensor dtable = got;
            ref_ops().embedding_bwd(dtable, dy, ids, 0, accumulate, s);
            ops->embedding_bwd(got, dy, ids, 0, accumulate, s);
            expect_close(got, dtable, 6 + 2 * std::sqrt(static_cast<double>(R)), what + " backward");
          }
        }
      }
    }
  }
}

// In fp32 the order of the sum is the contract: rows of an id in their order, bit for bit.
TEST(Embedding, GradientIsTheFoldInRowOrder) {
  constexpr i64 V = 50, R = 700, C = 37;
  const Tensor ids = make_ids(R, V, 5);
  Tensor dy(DType::F32, {R, C}), start(DType::F32, {V, C});
  dy.randomize(1);
  start.randomize(2);
  for (bool accumulate : {false, true}) {
    Tensor want = start;
    for (i64 v = 0; v < V; ++v) {
      for (i64 c = 0; c < C; ++c) {
        float sum = accumulate ? start.at(v * C + c) : 0;
        for (i64 r = 0; r < R; ++r) {
          if (ids.view().as<i32>()[r] == v) sum += dy.at(r * C + c);
        }
        want.set(v * C + c, sum);
      }
    }
    for (const OpTable* ops : backends()) {
      expect_same_for_any_threads(
          [&](Stream& s) {
            Tensor got = start;
            ops->embedding_bwd(got, dy, ids, 0, accumulate, s);
            expect_same_bits(got, want, std::string(ops->name));
            return std::vector<Tensor>{got};
          },
          std::string(ops->name));
    }
  }
}

// A vocabulary cut into parts, one call each: lookups add up to that of the whole table, gradients are its rows. Ids
// beyond every part, negative ones too, are nobody's.
TEST(Embedding, PartsOfAVocabularyMakeTheWhole) {
  for (const OpTable* ops : backends()) {
    for (DType t : kWorkDTypes) {
      for (auto [V, R, C] : {Case{300, 90, 64}, Case{256, 700, 17}, Case{1027, 40, 130}}) {
        const std::string what = std::string(ops->name) + " " + std::string(dtype_name(t)) + " V" + std::to_string(V) +
                                 " C" + std::to_string(C);
        Tensor ids = make_ids(R, V, 9);
        for (i64 r = 3; r < R; r += 7) {
          ids.view().as<i32>()[r] = r % 2 == 0 ? static_cast<i32>(V + r) : r % 3 == 0 ? -1 : INT32_MIN;
        }
        Tensor table(t, {V, C}), dy(t, {R, C}), start(t, {R, C});
        table.randomize(1);
        dy.randomize(3);
        start.randomize(4).set(0, -0.0f);
        expect_same_for_any_threads(
            [&](Stream& s) {
              Tensor whole(t, {R, C}), onto(start), parts(t, {R, C}), parts_onto(start), dtable(DType::F32, {V, C}),
                  dtable_parts(dtable), dtable_whole(dtable);
              ops->embedding_fwd(whole, table, ids, 0, false, s);
              ops->embedding_fwd(onto, table, ids, 0, true, s);
              ops->embedding_bwd(dtable_whole, dy, ids, 0, false, s);
              bool first = true;
              const i64 cuts[] = {0, 1, V / 3, V - 5, V};
              for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
                const i64 begin = cuts[i], count = cuts[i + 1] - begin;
                Tensor part(t, {R, C});
                ops->embedding_fwd(part, table.view().rows(begin, count), ids, begin, false, s);
                for (i64 r = 0; r < R; ++r) {
                  const i64 id = ids.view().as<i32>()[r];
                  const bool here = id >= begin && id < begin + count;
                  for (i64 c = 0; c < C; ++c) {
                    if (part.at(r * C + c) != (here ? table.at(id * C + c) : 0)) {
                      ADD_FAILURE() << what << " row " << r << " column " << c;
                      return std::vector<Tensor>{};
                    }
                  }
                }
                ops->embedding_fwd(parts, table.view().rows(begin, count), ids, begin, !first, s);
                ops->embedding_fwd(parts_onto, table.view().rows(begin, count), ids, begin, true, s);
                ops->embedding_bwd(dtable_parts.view().rows(begin, count), dy, ids, begin, false, s);
                first = false;
              }
              expect_same_bits(parts, whole, what + " lookup");
              expect_same_bits(parts_onto, onto, what + " lookup onto");
              expect_same_bits(dtable_parts, dtable_whole, what + " gradient");
              ref_ops().embedding_bwd(dtable, dy, ids, 0, false, s);
              expect_close(dtable_whole, dtable, 64, what + " gradient of ref");
              return std::vector<Tensor>{parts, parts_onto, dtable_parts};
            },
            what);
        if (HasFailure()) return;
      }
    }
  }
}

// So a row is set to zero, wherever it lies.
TEST(Embedding, TheGradientOfNoLookUpsIsZero) {
  constexpr i64 V = 5, C = 37;
  std::vector<const OpTable*> all = backends();
  all.push_back(&ref_ops());
  for (const OpTable* ops : all) {
    for (const DType t : kWorkDTypes) {
      Tensor ids(DType::I32, {1}), dy(t, {1, C}), start(t, {V, C});
      start.randomize(1);
      Tensor want = start;
      for (i64 c = 0; c < C; ++c) want.set(2 * C + c, 0);
      expect_same_for_any_threads(
          [&](Stream& s) {
            Tensor got = start;
            for (const bool accumulate : {true, false})
              ops->embedding_bwd(got.view().rows(accumulate ? 1 : 2, 1), dy.view().rows(0, 0), ids.view().rows(0, 0), 2,
                                 accumulate, s);
            expect_same_bits(got, want, std::string(ops->name));
            return std::vector<Tensor>{got};
          },
          std::string(ops->name));
    }
  }
}

TEST(Embedding, RefGradientMatchesFiniteDifferences) {
  Stream s{};
  constexpr i64 V = 6, R = 9, C = 3;
  const Tensor ids = make_ids(R, V, 7);
  Doubles table({V, C}), dtable({V, C}), y({R, C}), dy({R, C});
  table.randomize(1);
  dy.randomize(2);
  ref_ops().embedding_bwd(dtable.view, dy.view, ids, 0, false, s);
  expect_gradient(
      table, dtable,
      [&] {
        ref_ops().embedding_fwd(y.view, table.view, ids, 0, false, s);
        return y.dot(dy);
      },
      "dtable");
}

}  // namespace embedding_test
}  // namespace ds::testing
