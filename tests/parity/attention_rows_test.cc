// SPDX-License-Identifier: Apache-2.0
// Attention whose rows depend on their own sequence alone: sequences together and apart, in pages and side by side,
// with any number of queries and of parts, from codes; and append_keys, which writes the pages.

#include <bit>

#include "parity/parity.h"
#include "slow_set.h"

namespace ds::testing {
namespace attention_rows_test {

struct Text {
  i64 queries, keys;
};

struct Case {
  DType dtype = DType::F32;
  i64 H = 4, G = 2, D = 64, Dv = 64, page = 64;
  i64 window = 0, sinks = 0, block = 0;  // block: of a random layout; 0: none
  float softcap = 0;
  bool bias = false, per_head = false, coded = false;

  std::string name() const {
    std::string s(dtype_name(dtype));
    for (i64 x : {H, G, D, Dv, page, window, sinks, block}) s += " " + std::to_string(x);
    return s + (softcap > 0 ? " capped" : "") + (bias ? " biased" : "") + (per_head ? " per head" : "") +
           (coded ? " coded" : "");
  }
};

// Keys and values of some texts, each with rows of its own, and queries at the end of each.
class Batch {
 public:
  Batch(const Case& c, std::vector<Text> texts) : c_(c), texts_(std::move(texts)) {
    for (const Text& t : texts_) {
      begins_.push_back(begins_.back() + static_cast<i32>(t.queries));
      keys_.push_back(static_cast<i32>(t.keys));
      most_ = std::max(most_, t.keys);
      pages_ += (t.keys + c.page - 1) / c.page;
    }
    stride_ = (most_ + c.page - 1) / c.page + 1;
    q_ = Tensor(c.dtype, {1, rows(), c.H, c.D}).randomize(11);
    const i64 n = std::ssize(texts_);
    places_.assign(static_cast<size_t>(n * stride_), 0);
    for (i64 s = 0, used = pages_; s < n; ++s) {
      tables_.push_back(static_cast<i32>(n - 1 - s));
      for (i64 p = 0; p * c.page < texts_[s].keys; ++p) places_[(n - 1 - s) * stride_ + p] = static_cast<i32>(--used);
    }
    for (const bool values : {false, true}) fill(values);
    make_layout();
    bias_ = Tensor(DType::F32, {c.H, 2 * kReach + 1}).randomize(5);
  }

  i64 rows() const { return begins_.back(); }
  i64 rows_before(i64 s) const { return begins_[s]; }
  i64 size() const { return std::ssize(texts_); }
  const Text& text(i64 s) const { return texts_[s]; }

  struct Result {
    Tensor o, lse;
  };
  // All texts in one call.
  Result together(const OpTable& ops, int threads = 2) const {
    AttentionParams p = params();
    p.sequences = {
        .count = size(), .begins = begins_.data(), .keys = keys_.data(), .tables = tables_.data(), .stride = stride_};
    return run(ops, p, q_, -1, most_, threads);
  }
  // The last `queries` of the first `keys` positions of a text, in a call of its own.
  Result apart(const OpTable& ops, i64 s, i64 queries, i64 keys, bool paged) const {
    const i64 end = begins_[s + 1] - (texts_[s].keys - keys);
    const i32 begins[] = {0, static_cast<i32>(queries)}, length = static_cast<i32>(keys);
    TensorView q = q_;
    q.data = q.as<char>() + (end - queries) * q.stride[1] * dtype_bytes(q.dtype);
    q.shape[1] = queries;
    AttentionParams p = params();
    p.grid.row0 = keys - queries;
    if (paged) p.sequences = {.count = 1, .begins = begins, .keys = &length, .tables = &tables_[s], .stride = stride_};
    return run(ops, p, q, paged ? -1 : s, keys, 2);
  }

 private:
  static constexpr i64 kReach = 40;

  AttentionParams params() const {
    AttentionParams p{.scale = 1.0f / std::sqrt(static_cast<float>(c_.D)), .window = c_.window};
    p.softcap = c_.softcap;
    p.sinks = c_.sinks;
    if (c_.bias) p.bias = bias_.view().as<float>(), p.reach = kReach;
    if (c_.block > 0)
      p.blocks = {.block = c_.block, .count = blocks_, .layouts = c_.per_head ? c_.H : 1, .keys = bits_.data()};
    p.rowwise = true;
    return p;
  }
  // text: the one whose keys lie side by side; -1: all are in pages.
  Result run(const OpTable& ops, AttentionParams p, const TensorView& q, i64 text, i64 most, int threads) const {
    ThreadPool pool(threads);
    Stream stream{.pool = &pool};
    if (text < 0) p.pages = places_.data(), p.page = c_.page;
    const i64 T = q.dim(1);
    Result r{Tensor(c_.dtype, {1, T, c_.H, c_.Dv}), Tensor(DType::F32, {1, c_.H, T})};
    ops.attention_fwd(r.o, r.lse, q, keys(false, text, most), keys(true, text, most), p, stream);
    return r;
  }
  i64 dim(bool values) const { return values ? c_.Dv : c_.D; }
  TensorView keys(bool values, i64 text, i64 most) const {
    const i64 D = dim(values);
    TensorView x = stored_[values];
    if (text >= 0) {
      i64 first = 0;
      for (i64 s = 0; s < text; ++s) first += texts_[s].keys;
      x = TensorView::of(elements_[values].view().as<char>() + first * c_.G * D * dtype_bytes(c_.dtype), c_.dtype,
                         {1, most, c_.G, D});
    } else if (c_.coded) {
      x = TensorView::of(const_cast<std::int8_t*>(codes_[values].data()), DType::I8, {1, pages_ * c_.page, c_.G, D});
      x.scale = const_cast<float*>(scales_[values].data());
    }
    x.shape[1] = most;
    return x;
  }
  void fill(bool values) {
    const i64 D = dim(values), G = c_.G;
    i64 total = 0;
    for (const Text& t : texts_) total += t.keys;
    elements_[values] = Tensor(c_.dtype, {total, G, D}).randomize(values ? 21 : 22);
    stored_[values] = Tensor(c_.dtype, {1, pages_ * c_.page, G, D}).randomize(77);
    codes_[values].assign(static_cast<size_t>(pages_ * c_.page * G * D), 3);
    scales_[values].assign(static_cast<size_t>(pages_ * c_.page * G), 0.5f);
    i64 row = 0;
    for (i64 s = 0; s < size(); ++s) {
      for (i64 j = 0; j < texts_[s].keys; ++j, ++row) {
        const i64 to = places_[tables_[s] * stride_ + j / c_.page] * c_.page + j % c_.page;
        for (i64 g = 0; g < G; ++g) {
          const float scale = 0.01f + 1e-4f * static_cast<float>((row * 7 + g) % 50);
          scales_[values][to * G + g] = scale;
          for (i64 d = 0; d < D; ++d) {
            const i64 from = (row * G + g) * D + d, at = (to * G + g) * D + d;
            codes_[values][at] = static_cast<std::int8_t>((row * 31 + g * 17 + d * 57 + values) % 256 - 128);
            if (c_.coded) elements_[values].set(from, static_cast<float>(codes_[values][at]) * scale);
            stored_[values].set(at, elements_[values].at(from));
          }
        }
      }
    }
  }
  // Random blocks, and those of the queries themselves.
  void make_layout() {
    if (c_.block == 0) return;
    blocks_ = (most_ + c_.block - 1) / c_.block;
    const i64 words = (blocks_ + 63) / 64, layouts = c_.per_head ? c_.H : 1;
    bits_.assign(static_cast<size_t>(layouts * blocks_ * words), 0);
    const RngKey key{3, 1, 0};
    for (i64 l = 0; l < layouts; ++l) {
      for (i64 i = 0; i < blocks_; ++i) {
        for (i64 j = 0; j <= i; ++j) {
          if (i != j && RngKey::uniform(key.bits(static_cast<u64>((l * blocks_ + i) * blocks_ + j))) > 0.4f) continue;
          bits_[(l * blocks_ + i) * words + j / 64] |= u64{1} << (j % 64);
        }
      }
    }
  }

  Case c_;
  std::vector<Text> texts_;
  std::vector<i32> begins_ = {0}, keys_, tables_, places_;
  i64 most_ = 0, pages_ = 0, stride_ = 0, blocks_ = 0;
  Tensor q_, elements_[2], stored_[2], bias_;
  std::vector<std::int8_t> codes_[2];
  std::vector<float> scales_[2];
  std::vector<u64> bits_;
};

// Row i of a result has the bits of row j of another one.
void expect_same_row(const Batch::Result& a, i64 i, const Batch::Result& b, i64 j, const std::string& what) {
  const TensorView &x = a.o, &y = b.o;
  const i64 width = x.dim(2) * x.dim(3) * dtype_bytes(x.dtype);
  ASSERT_EQ(std::memcmp(x.as<char>() + i * width, y.as<char>() + j * width, static_cast<size_t>(width)), 0) << what;
  for (i64 h = 0; h < x.dim(2); ++h) {
    const float got = a.lse.at(h * x.dim(1) + i), want = b.lse.at(h * y.dim(1) + j);
    ASSERT_EQ(std::bit_cast<u32>(got), std::bit_cast<u32>(want)) << what << " lse of head " << h;
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  i64 n = 0;
  for (const DType dtype : kWorkDTypes) {
    for (const i64 D : {32, 64, 80, 96, 128, 192, 256}) {
      Case c{.dtype = dtype, .D = D, .Dv = D == 192 ? 128 : D};
      switch (n++ % 7) {
        case 0: break;
        case 1: c.window = 130, c.sinks = 3; break;
        case 2: c.block = 32, c.page = 64, c.window = 700; break;
        case 3: c.softcap = 8, c.H = 7, c.G = 1; break;
        case 4: c.block = 16, c.per_head = true; break;
        case 5: c.bias = true, c.page = 128, c.G = 4; break;
        case 6: c.coded = true, c.H = 6; break;
      }
      all.push_back(c);
    }
  }
  return all;
}

class AttentionRows : public ::testing::Test {};

// Short and long, a single query and prompts, some of whose tiles are not whole. With many more texts a block of a
// device has all parts of its keys, which alone are in blocks of their own.
TEST_F(AttentionRows, SequencesTogetherHaveTheBitsOfEachAlone) {
  i64 number = 0;
  test::EveryNth tried(test_device() != nullptr ? 2 : 1);
  for (const Case& c : cases()) {
    if (!tried()) continue;
    std::vector<Text> texts = {{1, 1100}, {3, 5}, {1, 1}, {9, 600}, {70, 70}, {2, 1200}};
    const i64 looked_at = std::ssize(texts);
    if (number++ % 2 == 0) texts.insert(texts.end(), 130, {1, 2});
    const Batch batch(c, texts);
    for (const OpTable* ops : backends()) {
      const std::string what = std::string(ops->name) + ": " + c.name();
      const Batch::Result all = batch.together(*ops);
      for (i64 s = 0; s < looked_at; ++s) {
        const auto& [queries, keys] = batch.text(s);
        for (const bool paged : {false, true}) {
          const Batch::Result one = batch.apart(*ops, s, queries, keys, paged);
          for (i64 i = 0; i < queries; ++i) {
            expect_same_row(all, batch.rows_before(s) + i, one, i,
                            what + (paged ? ", text " : ", text side by side ") + std::to_string(s));
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// The bits of a query do not depend on those before it in the call, nor on later keys; but on CPUs with a layout, where
// a tile has the blocks of all its rows side by side.
TEST_F(AttentionRows, AnyNumberOfQueriesGivesTheSameBits) {
  test::EveryNth tried(test_device() != nullptr ? 2 : 1);
  for (const Case& c : cases()) {
    if (!tried()) continue;
    if (c.block > 0 && test_device() == nullptr) continue;
    const Batch batch(c, {{140, 1090}});
    for (const OpTable* ops : backends()) {
      const Batch::Result all = batch.together(*ops);
      for (i64 queries = 1; queries <= 9; ++queries) {
        const i64 keys = 1090 - 15 * (9 - queries), at = 140 - (1090 - keys) - queries;
        const Batch::Result few = batch.apart(*ops, 0, queries, keys, queries % 2 == 0);
        for (i64 i = 0; i < queries; ++i) {
          expect_same_row(all, at + i, few, i,
                          std::string(ops->name) + ": " + c.name() + ", queries " + std::to_string(queries));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(AttentionRows, AgreeWithTheDefinition) {
  test::EveryNth tried(test_device() != nullptr ? 2 : 1);
  for (const Case& c : cases()) {
    if (!tried()) continue;
    const Batch batch(c, {{2, 1300}, {1, 3}, {40, 90}});
    const Batch::Result want = batch.together(ref_ops());
    for (const OpTable* ops : backends()) {
      const Batch::Result got = batch.together(*ops);
      const std::string what = std::string(ops->name) + ": " + c.name();
      const double slack = c.dtype == DType::F32 ? 250 : rounds_probabilities(*ops, c.dtype) ? 8 : 2.2;
      expect_close(got.o, want.o, slack, what + " o");
      expect_close(got.lse, want.lse, 30, what + " lse", 1);
      if (HasFatalFailure()) return;
    }
  }
}

// As many sequences as fill a device, and many threads: parts are shared or not.
TEST_F(AttentionRows, ManySequencesAndThreads) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    const Case c{.dtype = dtype, .H = 4, .G = 4, .D = 32, .Dv = 32};
    std::vector<Text> texts;
    for (i64 s = 0; s < 70; ++s) texts.push_back({1 + s % 3, 5 + s * (s % 10 == 1 ? 20 : 3)});
    texts.push_back({1, 2500});
    const Batch batch(c, texts);
    for (const OpTable* ops : backends()) {
      const Batch::Result want = batch.together(*ops, 1), got = batch.together(*ops, 5);
      expect_same_bits(got.o, want.o, "o");
      expect_same_bits(got.lse, want.lse, "lse");
      for (const i64 s : {i64{0}, i64{41}, i64{70}}) {
        const auto& [queries, keys] = batch.text(s);
        const Batch::Result one = batch.apart(*ops, s, queries, keys, true);
        for (i64 i = 0; i < queries; ++i) {
          expect_same_row(want, batch.rows_before(s) + i, one, i, std::string(ops->name) + ": " + std::to_string(s));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(AttentionRows, NewKeysComeToTheirPages) {
  i64 n = 0;
  for (const DType dtype : kWorkDTypes) {
    for (const i64 D : {16, 40, 64, 130}) {
      for (const bool coded : {false, true}) {
        const i64 G = 1 + n % 3, gap = n % 2, page = 16;
        const std::vector<i32> begins = {0, 1, 20, 23}, keys = {33, 19, 18}, tables = {2, 0, 1},
                               pages = {4, 1, 0, 3, 2, 0, 6, 7, 5};
        Tensor wide(dtype, {1, 23, G + gap, D});
        wide.randomize(static_cast<u32>(n));
        TensorView x = wide;
        x.shape[2] = G;
        AttentionParams p;
        p.pages = pages.data(), p.page = page;
        p.sequences = {.count = 3, .begins = begins.data(), .keys = keys.data(), .tables = tables.data(), .stride = 3};
        const auto append = [&](const OpTable& ops) {
          ThreadPool pool(3);
          Stream stream{.pool = &pool};
          std::vector<u8> bytes(static_cast<size_t>(8 * page * G * D * dtype_bytes(dtype)), 0x5A);
          std::vector<float> scales(static_cast<size_t>(8 * page * G), -1.0f);
          TensorView cache = TensorView::of(bytes.data(), coded ? DType::I8 : dtype, {1, 8 * page, G, D});
          if (coded) cache.scale = scales.data();
          ops.append_keys(cache, x, p, stream);
          return std::pair(bytes, scales);
        };
        const auto want = append(ref_ops());
        EXPECT_NE(want.first, std::vector<u8>(want.first.size(), 0x5A));
        for (const OpTable* ops : backends()) EXPECT_EQ(append(*ops), want) << ops->name << " " << n;
        ++n;
      }
    }
  }
}

}  // namespace attention_rows_test
}  // namespace ds::testing
