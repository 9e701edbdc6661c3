// SPDX-License-Identifier: Apache-2.0
// Matrices of codes: packing, products, look-ups and losses. Their bits are those of the same op with the decoded
// matrix, row by row where bits otherwise depend on rows; sums of integers have the same bits everywhere.

#include "ds/kernels/codes.h"

#include <fmt/format.h>

#include <array>
#include <optional>

#include "parity.h"
#include "slow_set.h"

namespace ds::testing {
namespace codes_test {

using Bytes = std::vector<u8>;

float scale_of(const CodedForm& form, float x) {
  if (form.scales == DType::BF16) return to_float(to_bf16(x));
  return form.scales == DType::F16 ? to_float(to_f16(x)) : x;
}
void put_scale(const CodedForm& form, u8* p, float x) {
  const bf16 b = to_bf16(x);
  const f16 h = to_f16(x);
  const bool whole = form.scales == DType::F32;
  std::memcpy(p,
              whole                        ? static_cast<const void*>(&x)
              : form.scales == DType::BF16 ? static_cast<const void*>(&b)
                                           : &h,
              whole ? 4 : 2);
}

// A matrix of random codes, in rows.
class Coded {
 public:
  Coded(const CodedForm& f, i64 N, i64 K, u32 seed, float scale = 0x1p-6f) : form(f), N_(N), K_(K) {
    rows_.resize(static_cast<size_t>(N * form.row_bytes(K)));
    const RngKey key{seed, 3, 0};
    for (size_t i = 0; i < rows_.size(); i += 16) {
      const PhiloxBlock random = key.block(i);
      std::memcpy(rows_.data() + i, &random, std::min(sizeof(PhiloxBlock), rows_.size() - i));
    }
    for (i64 n = 0; n < N; ++n) {
      for (i64 k = 0; k < K; ++k) {
        if (form.kind == CodeKind::E4M3 && (code(n, k) & 0x7F) == 0x7F) code(n, k) = 0x7E;
        if (k % form.group != 0) continue;
        const PhiloxBlock r = key.block(static_cast<u64>((1 << 30) + n * K + k));
        set_scale(n, k, scale * (0.5f + RngKey::uniform(r[0])));
        if (form.offsets) set_offset(n, k, 8 * scale * (RngKey::uniform(r[1]) - 0.5f));
      }
    }
  }
  u8& code(i64 n, i64 k) { return rows_[static_cast<size_t>(form.place({}, N_, K_, n, k).code)]; }
  void set_scale(i64 n, i64 k, float x) {
    put_scale(form, rows_.data() + form.place({}, N_, K_, n, k).scale, scale_of(form, x));
  }
  void set_offset(i64 n, i64 k, float x) { std::memcpy(rows_.data() + form.place({}, N_, K_, n, k).offset, &x, 4); }

  TensorView view(Bytes& bytes, DType work, Panels panels) const {
    TensorView v = TensorView::of(bytes.data(), work, {N_, K_});
    v.codes = form, v.panels = panels;
    return v;
  }
  TensorView in_rows(DType work) { return view(rows_, work, {}); }
  // By the definition of places.
  Bytes in_panels(Panels panels) const {
    Bytes to(rows_.size());
    for (i64 n = 0; n < N_; ++n) {
      for (i64 k = 0; k < K_; ++k) {
        const CodedForm::Place from = form.place({}, N_, K_, n, k), at = form.place(panels, N_, K_, n, k);
        const auto move = [&](i64 target, i64 source, i64 bytes) {
          std::copy_n(rows_.begin() + source, bytes, to.begin() + target);
        };
        move(at.scale, from.scale, dtype_bytes(form.scales));
        if (form.offsets) move(at.offset, from.offset, 4);
        if (form.kind == CodeKind::Int4) {
          const int value = rows_[static_cast<size_t>(from.code)] >> from.shift & 15;
          to[static_cast<size_t>(at.code)] = static_cast<u8>(to[static_cast<size_t>(at.code)] | value << at.shift);
        } else {
          move(at.code, from.code, 1);
        }
      }
    }
    return to;
  }
  Tensor decoded(DType work) const {
    Tensor t(work, {N_, K_});
    for (i64 i = 0; i < t.numel(); ++i) t.set(i, form.element(rows_.data(), {}, N_, K_, i / K_, i % K_));
    return t;
  }
  std::string name() const {
    return fmt::format("kind {} scales {}{}{} group {} {}x{}", static_cast<int>(form.kind), dtype_name(form.scales),
                       form.offsets ? " offsets" : "", form.integer ? " integer" : "", form.group, N_, K_);
  }

  CodedForm form;
  Bytes& rows() { return rows_; }

 private:
  i64 N_, K_;
  Bytes rows_;
};

std::vector<CodedForm> forms_of(i64 K) {
  std::vector<CodedForm> forms;
  for (const CodeKind kind : {CodeKind::Int8, CodeKind::Int4, CodeKind::E4M3}) {
    for (const DType scales : {DType::BF16, DType::F16, DType::F32}) {
      for (const bool offsets : {false, true}) {
        for (const i32 group : {16, 32, 64, 128, static_cast<i32>(K)}) {
          if (K % group == 0) forms.push_back({.kind = kind, .scales = scales, .offsets = offsets, .group = group});
        }
      }
    }
  }
  return forms;
}
CodedForm integers(i64 K, DType scales = DType::F32) {
  return {.kind = CodeKind::Int8, .scales = scales, .integer = true, .group = static_cast<i32>(K)};
}
// All forms whose products sum integers.
std::vector<CodedForm> integer_forms(i64 K) {
  std::vector<CodedForm> forms = forms_of(K);
  std::erase_if(forms, [](const CodedForm& form) { return form.kind == CodeKind::E4M3; });
  for (CodedForm& form : forms) form.integer = true;
  return forms;
}

std::vector<const OpTable*> coded_backends() {
  std::vector<const OpTable*> all;
  for (const OpTable* ops : backends()) {
    if (ops->codes) all.push_back(ops);
  }
  return all;
}

TEST(CodedMatrix, IsTakenByAllBackends) {
  EXPECT_TRUE(ref_ops().codes);
  for (const OpTable* ops : backends()) EXPECT_TRUE(ops->codes) << ops->name;
}

TEST(CodedMatrix, IsPackedInPlaceAtAnyThreads) {
  test::EveryNth tried(3);
  for (const OpTable* ops : coded_backends()) {
    if (!packs(*ops)) continue;
    for (const auto& [N, K] : {std::pair<i64, i64>{1, 16}, {16, 128}, {31, 48}, {32, 256}, {75, 896}}) {
      std::vector<CodedForm> forms = forms_of(K);
      forms.push_back(integers(K)), forms.push_back(integers(K, DType::BF16));
      for (const bool offsets : {false, true})
        forms.push_back({.kind = CodeKind::Int4, .offsets = offsets, .integer = true, .group = 16});
      for (const CodedForm& form : forms) {
        for (const DType work : kWorkDTypes) {
          if (!form.integer && !tried()) continue;
          Coded m(form, N, K, 1);
          const Bytes want = m.in_panels(panels_of(*ops, work, form));
          for (const int threads : {1, 3}) {
            ThreadPool pool(threads);
            Stream stream{&pool};
            Bytes got = m.rows();
            ops->pack_matrix(m.view(got, work, {}), stream);
            ASSERT_EQ(got, want) << ops->name << " " << dtype_name(work) << " " << m.name();
          }
        }
      }
    }
  }
}

struct Product {
  i64 M;
  DType work, out;
  Activation activation = Activation::None;
  bool more = false;  // bias, residual and preact
};
std::array<Tensor, 2> multiply(const OpTable& ops, const Product& p, const TensorView& b, int threads) {
  ThreadPool pool(threads);
  Stream stream{&pool};
  const i64 N = b.dim(0), K = b.dim(1);
  const Tensor a = Tensor(p.work, {p.M, K + 3}).randomize(11), bias = Tensor(p.work, {N}).randomize(12),
               residual = Tensor(p.out, {p.M, N}).randomize(13);
  TensorView rows = a;
  rows.shape[1] = K;
  Tensor c(p.out, {p.M, N}), preact(p.out, {p.M, N});
  c.fill(0), preact.fill(0);
  const TensorView none{};
  ops.matmul(c, rows, b, p.more ? bias.view() : none, p.more ? preact.view() : none, p.more ? residual.view() : none,
             {.trans_b = true, .activation = p.activation, .rowwise = true}, stream);
  return {c, preact};
}

// The decoded matrix, in panels if the backend has them.
class Decoded {
 public:
  Decoded(const OpTable& ops, const Coded& m, DType work) : rows_(m.decoded(work)) {
    if (packs(ops)) panels_.emplace(ops, rows_);
  }
  TensorView view() const { return panels_ ? static_cast<TensorView>(*panels_) : rows_.view(); }

 private:
  Tensor rows_;
  std::optional<InPanels> panels_;
};
Decoded decoded_for(const OpTable& ops, const Coded& m, DType work) { return {ops, m, work}; }

// The product with codes, in panels and in rows, against that with the decoded matrix in panels.
void expect_decoded_bits(const OpTable& ops, Coded& m, const Product& p, const std::string& what) {
  const auto want = multiply(ops, p, decoded_for(ops, m, p.work).view(), 2);
  Bytes packed = m.in_panels(panels_of(ops, p.work, m.form));
  for (const bool in_panels : {true, false}) {
    if (in_panels && !packs(ops)) continue;
    for (const int threads : {1, 3}) {
      if (threads == 3 && !in_panels) continue;
      const TensorView b = in_panels ? m.view(packed, p.work, panels_of(ops, p.work, m.form)) : m.in_rows(p.work);
      const auto got = multiply(ops, p, b, threads);
      for (const size_t i : {0, 1})
        expect_same_bits(
            got[i], want[i],
            fmt::format("{}: {} {} to {}, {} rows, {}, {}, {} threads, result {}", what, ops.name, dtype_name(p.work),
                        dtype_name(p.out), p.M, m.name(), in_panels ? "panels" : "rows", threads, i));
    }
  }
}

constexpr i64 kNumbersOfRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 300};

TEST(CodedMatrix, ProductsHaveTheBitsOfTheDecodedMatrix) {
  const std::pair<i64, i64> shapes[] = {{1, 16}, {33, 128}, {64, 896}, {129, 400}, {31, 1664}, {97, 768}};
  test::EveryNth tried(31);
  size_t number = 0;
  for (const OpTable* ops : coded_backends()) {
    for (const auto& [N, K] : shapes) {
      for (const CodedForm& form : forms_of(K)) {
        for (const i64 M : kNumbersOfRows) {
          const DType work = kWorkDTypes[++number % 3];
          if (!tried()) continue;
          Coded m(form, N, K, static_cast<u32>(M));
          expect_decoded_bits(*ops, m, {.M = M, .work = work, .out = number % 5 < 2 ? DType::F32 : work}, "plain");
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(CodedMatrix, ProductsAreFinishedLikeOthers) {
  for (const OpTable* ops : coded_backends()) {
    for (const CodeKind kind : {CodeKind::Int8, CodeKind::Int4}) {
      for (const i64 M : {3, 40}) {
        for (const DType work : kWorkDTypes) {
          Coded m({.kind = kind, .offsets = true, .group = 32}, 75, 832, 1);
          expect_decoded_bits(*ops, m, {M, work, work, Activation::Silu, true}, "finished");
        }
      }
    }
  }
}

// Subnormal elements, which some instructions take for zero although they would round to normal ones; elements beyond
// the largest number; offsets that cancel; NaN.
TEST(CodedMatrix, ExtremesAreDecodedLikeOthers) {
  const float scales[] = {
      0x1p-149f, 0x1.FEp-127f, 0x1.FFFFFEp-127f, 0x1p-126f, 0x1.FFp-134f, 0x1.01p-133f, 0x1p-120f, 0x1p-91f, 0x1p-89f,
      0x1p127f,  0x1p121f,     128.5f,           INFINITY,  NAN,          -0.5f,        0.0f,      -0.0f,    1e-20f};
  constexpr i64 N = 64, K = 96;
  test::EveryNth tried(7);
  for (const OpTable* ops : coded_backends()) {
    for (const CodedForm& form : forms_of(K)) {
      if (form.group != 32 && form.group != 16) continue;
      for (const DType work : kWorkDTypes) {
        for (const float scale : scales) {
          if (!tried()) continue;
          Coded m(form, N, K, 5);
          m.set_scale(9, 32, scale), m.set_scale(40, 64, scale);
          if (form.offsets) m.set_offset(9, 32, -100 * scale), m.set_offset(40, 64, scale);
          if (form.offsets) m.set_offset(50, 0, scale);
          expect_decoded_bits(*ops, m, {.M = scale == 0x1p-120f ? 20 : 1, .work = work, .out = DType::F32},
                              fmt::format("scale {}", scale));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(CodedMatrix, CodesOfNaNReachTheResult) {
  for (const OpTable* ops : coded_backends()) {
    for (const DType work : kWorkDTypes) {
      for (const i64 M : {1, 20}) {
        Coded m({.kind = CodeKind::E4M3, .group = 32}, 70, 64, 1);
        for (const i64 n : {3, 40, 68}) m.code(n, n % 64) = n == 40 ? 0xFF : 0x7F;
        expect_decoded_bits(*ops, m, {.M = M, .work = work, .out = work}, "NaN");
        Bytes packed = m.in_panels(panels_of(*ops, work, m.form));
        const Tensor c =
            multiply(*ops, {.M = M, .work = work, .out = work}, m.view(packed, work, panels_of(*ops, work)), 1)[0];
        for (i64 n = 0; n < 70; ++n) EXPECT_EQ(std::isnan(c.at(n)), n == 3 || n == 40 || n == 68) << n;
      }
    }
  }
}

TEST(CodedMatrix, TheOracleDecodesToo) {
  for (const CodedForm& form : forms_of(64)) {
    for (const DType work : kWorkDTypes) {
      Coded m(form, 17, 64, 2);
      const Product p{.M = 2, .work = work, .out = DType::F32};
      const Tensor want = multiply(ref_ops(), p, m.decoded(work), 1)[0];
      expect_same_bits(multiply(ref_ops(), p, m.in_rows(work), 1)[0], want, m.name());
      for (const u8 depth : {u8{1}, u8{2}}) {
        Bytes packed = m.in_panels({.rows = 8, .depth = depth});
        const TensorView b = m.view(packed, work, {.rows = 8, .depth = depth});
        expect_same_bits(multiply(ref_ops(), p, b, 1)[0], want, m.name());
      }
    }
  }
}

// As layers use them.
TEST(CodedMatrix, WholePanelsAreAMatrixOfTheirOwn) {
  constexpr i64 K = 160;
  for (const OpTable* ops : coded_backends()) {
    if (!packs(*ops)) continue;
    for (const DType work : kWorkDTypes) {
      for (CodedForm form : {CodedForm{.kind = CodeKind::Int4, .offsets = true, .group = 32}, integers(K)}) {
        const Panels panels = panels_of(*ops, work, form);
        const i64 first = 2 * panels.rows, N = first + 21;
        Coded m(form, N, K, 1);
        Bytes packed = m.in_panels(panels);
        const TensorView b = m.view(packed, work, panels);
        const Product p{.M = 1, .work = work, .out = work};
        const Tensor whole = multiply(*ops, p, b, 2)[0], left = multiply(*ops, p, b.rows(0, first), 2)[0],
                     right = multiply(*ops, p, b.rows(first, N - first), 2)[0];
        for (i64 n = 0; n < N; ++n) EXPECT_EQ(whole.at(n), n < first ? left.at(n) : right.at(n - first)) << n;
      }
    }
  }
}

// Experts: each a matrix of its own, one after the other.
TEST(CodedMatrix, ProductsOfGroupsHaveTheBitsOfTheDecodedMatrices) {
  constexpr i64 E = 3, K = 416, M = 330;
  const std::vector<i32> ends = {0, 1, 1, 280, 284, 300, 322};  // two groups for each expert; the last rows have none
  Tensor offsets(DType::I32, {static_cast<i64>(ends.size())});
  for (size_t i = 0; i < ends.size(); ++i) offsets.set(static_cast<i64>(i), static_cast<float>(ends[i]));
  test::EveryNth tried(test_device() != nullptr ? 31 : 7);
  for (const OpTable* ops : coded_backends()) {
    for (const i64 N : {64, 75}) {
      std::vector<CodedForm> forms = {integers(K)};
      for (const CodedForm& form : forms_of(K)) {
        if (form.group == 32 || form.group == K) forms.push_back(form);
      }
      for (const CodedForm& form : integer_forms(K)) {
        if (form.group == 32) forms.push_back(form);
      }
      for (const CodedForm& form : forms) {
        for (const DType work : kWorkDTypes) {
          if (!tried()) continue;
          ThreadPool pool(2);
          Stream stream{&pool};
          const Panels panels = panels_of(*ops, work, form);
          Tensor decoded(work, {E, N, K});
          Bytes rows, packed;
          for (i64 e = 0; e < E; ++e) {
            Coded m(form, N, K, static_cast<u32>(e));
            const Bytes one = m.in_panels(panels);
            rows.insert(rows.end(), m.rows().begin(), m.rows().end());
            packed.insert(packed.end(), one.begin(), one.end());
            std::memcpy(decoded.view().as<char>() + e * N * K * dtype_bytes(work), m.decoded(work).view().data,
                        static_cast<size_t>(N * K * dtype_bytes(work)));
          }
          const Tensor a = Tensor(work, {M, K}).randomize(1), untouched = Tensor(work, {M, N}).randomize(2);
          const auto product = [&](const OpTable& by, const TensorView& b) {
            Tensor c = untouched;
            by.grouped_matmul(c, a, b, offsets, true, stream);
            return c;
          };
          TensorView b = decoded;
          Tensor want = form.integer ? untouched : product(*ops, b);
          b.codes = form, b.data = rows.data();
          if (form.integer) want = product(ref_ops(), b);
          const std::string what =
              fmt::format("{} {} {} {}", ops->name, dtype_name(work), Coded(form, N, K, 1).name(), N);
          expect_same_bits(product(*ops, b), want, what + " in rows");
          if (!packs(*ops)) continue;
          b.panels = panels, b.data = packed.data();
          expect_same_bits(product(*ops, b), want, what + " in panels");
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(CodedMatrix, LooksUpDecodedRows) {
  constexpr i64 V = 75, C = 96, R = 30;
  Tensor ids(DType::I32, {R});
  for (i64 r = 0; r < R; ++r) ids.set(r, static_cast<float>((r * 37) % (V + 5)));
  std::vector<const OpTable*> all = coded_backends();
  if (!all.empty()) all.push_back(&ref_ops());
  for (const OpTable* ops : all) {
    ThreadPool pool(2);
    Stream stream{&pool};
    std::vector<CodedForm> forms = forms_of(C);
    forms.push_back(integers(C));
    forms.push_back({.kind = CodeKind::Int4, .integer = true, .group = 32});
    for (const CodedForm& form : forms) {
      for (const DType work : kWorkDTypes) {
        for (const bool accumulate : {false, true}) {
          Coded m(form, V, C, 3);
          Tensor want = Tensor(work, {R, C}).randomize(4);
          Tensor of_rows = want, of_panels = want;
          ops->embedding_fwd(want, m.decoded(work), ids, 2, accumulate, stream);
          ops->embedding_fwd(of_rows, m.in_rows(work), ids, 2, accumulate, stream);
          expect_same_bits(of_rows, want, m.name());
          if (!packs(*ops) && ops != &ref_ops()) continue;
          const Panels panels = packs(*ops) ? panels_of(*ops, work, form) : Panels{.rows = 16, .depth = 2};
          Bytes packed = m.in_panels(panels);
          ops->embedding_fwd(of_panels, m.view(packed, work, panels), ids, 2, accumulate, stream);
          expect_same_bits(of_panels, want, m.name());
        }
      }
    }
  }
}

Tensor losses_of(const OpTable& ops, DType work, const TensorView& weight, i64 T) {
  ThreadPool pool(2);
  Stream stream{&pool};
  const i64 V = weight.dim(0), C = weight.dim(1);
  const Tensor h = Tensor(work, {T, C}).randomize(1);
  Tensor targets(DType::I32, {T}), losses(DType::F32, {T}), logits(DType::F32, {8, V});
  for (i64 t = 0; t < T; ++t) targets.set(t, static_cast<float>(t * 31 % V));
  const TensorView none{};
  ops.linear_cross_entropy(losses, none, none, none, h, weight, none, targets, logits,
                           {.chunk_tokens = 8, .rowwise = true}, stream);
  return losses;
}
TEST(CodedMatrix, LossesAreThoseOfTheDecodedMatrix) {
  constexpr i64 V = 200, C = 128, T = 21;
  for (const OpTable* ops : coded_backends()) {
    for (const DType work : kWorkDTypes) {
      for (const CodedForm& form : forms_of(C)) {
        if (form.group != 64 || form.scales != DType::BF16) continue;
        Coded m(form, V, C, 3);
        const Panels panels = panels_of(*ops, work, form);
        Bytes packed = m.in_panels(panels);
        const Tensor want = losses_of(*ops, work, decoded_for(*ops, m, work).view(), T);
        expect_same_bits(losses_of(*ops, work, m.view(packed, work, panels), T), want, m.name());
        expect_same_bits(losses_of(*ops, work, m.in_rows(work), T), want, m.name());
        expect_close(losses_of(ref_ops(), work, m.in_rows(work), T), want, 64, m.name());
      }
      for (const CodedForm& form : {integers(C), CodedForm{.kind = CodeKind::Int4, .integer = true, .group = 32}}) {
        Coded m(form, V, C, 4);
        const Tensor want = losses_of(ref_ops(), work, m.in_rows(work), T);
        expect_close(losses_of(*ops, work, m.in_rows(work), T), want, 64, m.name());
      }
    }
  }
}

// Before a residual is added, and the sum rounded, there is one result.
void expect_sums_of_integers(Coded& m, const Product& p) {
  const auto want = multiply(ref_ops(), p, m.in_rows(p.work), 1);
  for (const OpTable* ops : coded_backends()) {
    const Panels panels = panels_of(*ops, p.work, m.form);
    Bytes packed = m.in_panels(panels);
    for (const bool in_panels : {true, false}) {
      for (const int threads : {1, 3}) {
        if (!packs(*ops) && (in_panels || threads > 1)) continue;
        const auto got = multiply(*ops, p, in_panels ? m.view(packed, p.work, panels) : m.in_rows(p.work), threads);
        const std::string what = fmt::format("{} {} to {}, {} rows, {}, {}", ops->name, dtype_name(p.work),
                                             dtype_name(p.out), p.M, m.name(), in_panels ? "panels" : "rows");
        expect_same_bits(got[p.more ? 1 : 0], want[p.more ? 1 : 0], what);
        if (p.more) expect_close(got[0], want[0], 2.1, what);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(CodedMatrix, SumsOfIntegersAreEqualEverywhere) {
  const std::pair<i64, i64> shapes[] = {{1, 16}, {33, 128}, {64, 896}, {150, 400}, {31, 832}};
  test::EveryNth tried(11), of_groups(151);
  for (const auto& [N, K] : shapes) {
    std::vector<CodedForm> forms = integer_forms(K);
    for (const DType scales : {DType::BF16, DType::F16, DType::F32}) forms.push_back(integers(K, scales));
    for (const CodedForm& form : forms) {
      const bool whole = form.kind == CodeKind::Int8 && !form.offsets && form.group == K;
      for (const i64 M : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 40, 130}) {
        for (const DType work : kWorkDTypes) {
          for (const DType out : {DType::F32, work}) {
            if (whole ? !tried() : !of_groups()) continue;
            Coded m(form, N, K, static_cast<u32>(M));
            for (const bool more : {false, true}) {
              expect_sums_of_integers(m, {.M = M, .work = work, .out = out, .more = more});
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

// Pairs of the largest products of each sign, which instructions on 16 bits would saturate.
TEST(CodedMatrix, LargestCodesDoNotSaturate) {
  constexpr i64 N = 70, K = 256;
  for (const CodeKind kind : {CodeKind::Int8, CodeKind::Int4}) {
    for (const i32 group : {16, 32, 256}) {
      Coded m({.kind = kind, .scales = DType::F32, .integer = true, .group = group}, N, K, 1);
      for (i64 n = 0; n < N; ++n) {
        for (i64 k = 0; k < K; ++k) {
          const bool high = n % 3 == 0 || (n % 3 == 1 && k % 2 == 0);
          if (kind == CodeKind::Int8) m.code(n, k) = static_cast<u8>(high ? 127 : -128);
          if (kind == CodeKind::Int4) m.code(n, k) = high ? 0xFF : 0;
          if (k % group == 0) m.set_scale(n, k, 1);
        }
      }
      for (const OpTable* ops : coded_backends()) {
        const Panels panels = panels_of(*ops, DType::F32, m.form);
        Bytes packed = m.in_panels(panels);
        for (const i64 M : {1, 2, 4, 5, 13}) {
          ThreadPool pool(2);
          Stream stream{&pool};
          Tensor a(DType::F32, {M, K}), c(DType::F32, {M, N});
          for (i64 i = 0; i < a.numel(); ++i) a.set(i, i / K % 2 == 0 ? 127.0f : -127.0f);
          ops->matmul(c, a, m.view(packed, DType::F32, panels), {}, {}, {}, {.trans_b = true}, stream);
          for (i64 i = 0; i < c.numel(); ++i) {
            double want = 0;
            for (i64 k = 0; k < K; ++k)
              want += static_cast<double>(a.at(i / N * K + k) * m.form.element(m.rows().data(), {}, N, K, i % N, k));
            ASSERT_EQ(static_cast<double>(c.at(i)), want) << ops->name << " " << m.name() << " " << i;
          }
        }
      }
    }
  }
}

// The largest sums: 131072 products of 127 and -128 are just below 2^31.
TEST(CodedMatrix, SumsOfIntegersAreExact) {
  constexpr i64 K = 131072, N = 35;
  for (const CodeKind kind : {CodeKind::Int8, CodeKind::Int4}) {
    const bool is_int8 = kind == CodeKind::Int8;
    const i64 codes[] = {is_int8 ? -128 : -8, is_int8 ? 127 : 7, is_int8 ? -127 : -7};
    Coded m({.kind = kind, .scales = DType::F32, .integer = true, .group = K}, N, K, 1);
    for (i64 n = 0; n < N; ++n) {
      m.set_scale(n, 0, 1);
      const i64 code = codes[n % 3];
      for (i64 k = 0; k < K; ++k) m.code(n, k) = static_cast<u8>(is_int8 ? code : (code + 8) * 17);
    }
    for (const OpTable* ops : coded_backends()) {
      const Panels panels = panels_of(*ops, DType::F32, m.form);
      Bytes packed = m.in_panels(panels);
      for (const i64 M : {1, 3, 13}) {
        ThreadPool pool(2);
        Stream stream{&pool};
        Tensor a(DType::F32, {M, K}), c(DType::F32, {M, N});
        for (i64 i = 0; i < a.numel(); ++i) a.set(i, i / K % 2 == 0 ? 127.0f : -127.0f);
        a.set(5, 126);  // so that a rounded sum differs
        ops->matmul(c, a, m.view(packed, DType::F32, panels), {}, {}, {}, {.trans_b = true}, stream);
        for (i64 i = 0; i < c.numel(); ++i) {
          const i64 row = i / N, code = codes[i % N % 3];
          const i64 sum = (row % 2 == 0 ? 127 * K : -127 * K) * code - (row == 0 ? code : 0);
          ASSERT_EQ(c.at(i), static_cast<float>(sum)) << m.name() << " " << ops->name << " " << M << " rows, " << i;
        }
      }
    }
  }
}

// A vocabulary of more columns than one side of a grid has blocks.
TEST(CodedMatrix, SumsOfIntegersHaveAnyNumberOfColumns) {
  constexpr i64 K = 16, N = 4 * 65536 + 1;
  Coded m(integers(K), N, K, 7);
  Tensor a(DType::F32, {1, K}), want(DType::F32, {1, N}), c(DType::F32, {1, N});
  for (i64 k = 0; k < K; ++k) a.set(k, static_cast<float>(k) - 5);
  ThreadPool pool(2);
  Stream stream{&pool};
  ref_ops().matmul(want, a, m.in_rows(DType::F32), {}, {}, {}, {.trans_b = true}, stream);
  for (const OpTable* ops : backends()) {
    c.fill(0);
    ops->matmul(c, a, m.in_rows(DType::F32), {}, {}, {}, {.trans_b = true}, stream);
    expect_same_bits(c, want, std::string(ops->name));
  }
}

TEST(CodedMatrix, RowsWithoutCodesAreNaN) {
  constexpr i64 K = 64, N = 40;
  std::vector<const OpTable*> all = coded_backends();
  if (!all.empty()) all.push_back(&ref_ops());
  for (const OpTable* ops : all) {
    for (const float x : {NAN, -INFINITY, INFINITY}) {
      Coded m(x > 0 ? integers(K) : CodedForm{.kind = CodeKind::Int4, .offsets = true, .integer = true, .group = 32}, N,
              K, 1);
      ThreadPool pool(1);
      Stream stream{&pool};
      Tensor a = Tensor(DType::BF16, {4, K}).randomize(1), c(DType::F32, {4, N});
      a.set(K + 3, x);
      for (i64 k = 0; k < K; ++k) a.set(2 * K + k, 0);
      ops->matmul(c, a, m.in_rows(DType::BF16), {}, {}, {}, {.trans_b = true}, stream);
      for (i64 i = 0; i < c.numel(); ++i) {
        EXPECT_EQ(std::isnan(c.at(i)), i / N == 1) << ops->name << " " << i;
        if (i / N == 2) {
          EXPECT_EQ(c.at(i), 0);
        }
      }
    }
  }
}

}  // namespace codes_test
}  // namespace ds::testing
