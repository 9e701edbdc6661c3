// SPDX-License-Identifier: Apache-2.0
// Rotary position tables: Su et al., "RoFormer"; scalings as computed by Hugging Face.

#include <cmath>
#include <numbers>

#include "model/models.h"

namespace ds::model {
namespace {

// Inverse frequencies [D/2], and the factor of cos and sin.
struct Frequencies {
  std::vector<double> inverse;
  double amplitude = 1;
};

double yarn_mscale(double factor, double mscale) { return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

Frequencies frequencies(const Rotation& r, i64 length) {
  const RopeScaling& rope = r.scaling;
  const double d = static_cast<double>(r.dim), factor = static_cast<double>(rope.factor);
  const double trained =
      static_cast<double>(rope.original_max_positions > 0 ? rope.original_max_positions : r.max_positions);
  double theta = static_cast<double>(r.theta);
  if (rope.type == RopeType::Dynamic) {
    // Hugging Face uses max_position_embeddings here, regardless of original_max_position_embeddings.
    const double M = static_cast<double>(r.max_positions), s = std::max(static_cast<double>(length), M);
    theta *= std::pow(factor * s / M - (factor - 1), d / (d - 2));
  }
  Frequencies f;
  f.inverse.resize(r.dim / 2);
  for (size_t k = 0; k < f.inverse.size(); ++k) f.inverse[k] = std::pow(theta, -2.0 * static_cast<double>(k) / d);

  switch (rope.type) {
    case RopeType::Default:
    case RopeType::Dynamic: break;
    case RopeType::Linear:
      for (double& inv : f.inverse) inv /= factor;
      break;
    case RopeType::Llama3: {
      const double low = static_cast<double>(rope.low_freq_factor), high = static_cast<double>(rope.high_freq_factor);
      for (double& inv : f.inverse) {
        const double wavelength = 2 * std::numbers::pi / inv;
        if (wavelength < trained / high) continue;
        if (wavelength > trained / low) {
          inv /= factor;
        } else {
          const double q = (trained / wavelength - low) / (high - low);
          inv *= (1 - q) / factor + q;
        }
      }
      break;
    }
    case RopeType::Yarn: {
      const auto correction_dim = [&](float rotations) {
        return d * std::log(trained / (2 * std::numbers::pi * static_cast<double>(rotations))) / (2 * std::log(theta));
      };
      double low = correction_dim(rope.beta_fast), high = correction_dim(rope.beta_slow);
      if (rope.truncate) {
        low = std::floor(low);
        high = std::ceil(high);
      }
      low = std::max(low, 0.0);
      high = std::min(high, d - 1);
      if (high == low) high += 0.001;
      for (size_t k = 0; k < f.inverse.size(); ++k) {
        const double ramp = std::clamp((static_cast<double>(k) - low) / (high - low), 0.0, 1.0);
        f.inverse[k] *= ramp / factor + 1 - ramp;
      }
      if (rope.attention_factor > 0) {
        f.amplitude = static_cast<double>(rope.attention_factor);
      } else if (rope.mscale != 0 && rope.mscale_all_dim != 0) {
        f.amplitude = yarn_mscale(factor, static_cast<double>(rope.mscale)) /
                      yarn_mscale(factor, static_cast<double>(rope.mscale_all_dim));
      } else {
        f.amplitude = yarn_mscale(factor, 1);
      }
      break;
    }
    case RopeType::LongRope: {
      const auto& ext = static_cast<double>(length) > trained ? rope.long_factor : rope.short_factor;
      for (size_t k = 0; k < f.inverse.size(); ++k) f.inverse[k] /= static_cast<double>(ext[k]);
      if (rope.attention_factor > 0) {
        f.amplitude = static_cast<double>(rope.attention_factor);
      } else if (factor > 1) {
        f.amplitude = std::sqrt(1 + std::log(factor) / std::log(trained));
      }
      break;
    }
  }
  return f;
}

}  // namespace

Rotation rotation_of(const ModelConfig& config) {
  return {.dim = config.rotary_dim(),
          .theta = config.rope_theta,
          .scaling = config.rope,
          .max_positions = config.max_positions};
}

RopeTables make_rope_tables(const Rotation& rotation, i64 length) {
  RopeTables tables;
  const Frequencies f = frequencies(rotation, length);
  const size_t half = f.inverse.size(), n = static_cast<size_t>(length) * half;
  tables.cos.resize(n);
  tables.sin.resize(n);
  for (size_t i = 0; i < n; ++i) {
    // Hugging Face multiplies position and inverse frequency in fp32; the table keeps that rounding.
    const float angle = static_cast<float>(i / half) * static_cast<float>(f.inverse[i % half]);
    tables.cos[i] = static_cast<float>(std::cos(static_cast<double>(angle)) * f.amplitude);
    tables.sin[i] = static_cast<float>(std::sin(static_cast<double>(angle)) * f.amplitude);
  }
  return tables;
}

}  // namespace ds::model
