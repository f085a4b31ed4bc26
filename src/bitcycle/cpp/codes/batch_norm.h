// Batch norm in training, alone or followed by a ReLU in place, as autograd nodes.
//
//     z = a x + b,   a = g / sqrt(v + e),   b = bias - a m        m, v: mean and biased variance of each channel
//     dL/dx = a (G - mean G - (x - m) mean(G (x - m)) / (v + e)),   G = dL/dz, with a ReLU 0 where z <= 0
//
// A ReLU that changes the output of batch norm in place takes its place in the graph: it finds where z <= 0 from x, which
// batch norm saves anyway, and needs no mask and no pass of its own. Ranges of outputs and gradients are noted for the
// quantizers that read them next (notes.h).

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <mutex>

#include "../relu.h"
#include "moments.h"

namespace bitcycle {

using at::Tensor;
using torch::autograd::variable_list;

inline Tensor nhwc(const Tensor& x) { return x.movedim(1, -1).contiguous(); }

// ---- batch norm ----

struct ChannelConstants {
    std::vector<float> mean, scale, shift;  // m, a, b
    std::vector<double> inverse, excess;    // 1 / sqrt(v + e), and by how much m is too large as a float32
};

inline void normalise(const float* __restrict x, float* __restrict z, int64_t rows, int64_t channels, const ChannelConstants& of) {
    for (int64_t row = 0; row < rows; row++, x += channels, z += channels)
        for (int64_t c = 0; c < channels; c += 16) {
            const __mmask16 lanes = lanes_from(c, channels);
            const __m512 product = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + c), _mm512_maskz_loadu_ps(lanes, &of.scale[c]));
            _mm512_mask_storeu_ps(z + c, lanes, _mm512_add_ps(product, _mm512_maskz_loadu_ps(lanes, &of.shift[c])));
        }
}

struct BatchNormNode : torch::autograd::Node {
    std::shared_ptr<torch::autograd::SavedVariable> saved;  // x [N, C, H, W]; shared with a ReLU in place
    ChannelConstants of;
    bool rectified = false;

    std::string name() const override { return "BatchNorm"; }
    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex_);
        saved.reset();
    }

    // G for 16 channels of a row
    __m512 gradient(__mmask16 lanes, __m512 x, const float* g, __m512 scale, __m512 shift) const {
        if (rectified) lanes = _mm512_mask_cmp_ps_mask(lanes, _mm512_add_ps(_mm512_mul_ps(x, scale), shift), _mm512_setzero_ps(), _CMP_NLE_UQ);
        return _mm512_maskz_loadu_ps(lanes, g);
    }

    // sum G and sum G (x - m) per channel, [2, C]
    std::vector<double> sums(const float* x, const float* g, const Units& units) const {
        std::vector<float> found(units.count() * 2 * units.channels);
        at::parallel_for(0, units.count(), 1, [&](int64_t first, int64_t last) {
            for (int64_t unit = first; unit < last; unit++) {
                const float *x_here = x + units.first(unit) * units.channels, *g_here = g + units.first(unit) * units.channels;
                sum_rows(units.size(unit), units.channels, &found[unit * 2 * units.channels], [&](int64_t channel, __mmask16 lanes) {
                    const auto load = [&](const std::vector<float>& from) { return _mm512_maskz_loadu_ps(lanes, &from[channel]); };
                    const __m512 mean = load(of.mean), scale = load(of.scale), shift = load(of.shift);
                    return [=, this](int64_t at, __m512& plain, __m512& product) {
                        const __m512 value = _mm512_maskz_loadu_ps(lanes, x_here + at);
                        const __m512 here = gradient(lanes, value, g_here + at, scale, shift);
                        plain = _mm512_add_ps(plain, here);
                        product = _mm512_fmadd_ps(here, _mm512_sub_ps(value, mean), product);
                    };
                });
            }
        });
        std::vector<double> all(2 * units.channels);
        for (size_t i = 0; i < found.size(); i++) all[i % all.size()] += found[i];
        for (int64_t c = 0; c < units.channels; c++) all[units.channels + c] += of.excess[c] * all[c];
        return all;
    }

    // dL/dx = a G + (x - m) factor + constant for rows of all channels
    void differentiate(const float* x, const float* g, float* to, int64_t rows, const std::vector<float>& factor,
                       const std::vector<float>& constant) const {
        const int64_t channels = factor.size();
        for (int64_t row = 0; row < rows; row++, x += channels, g += channels, to += channels)
            for (int64_t c = 0; c < channels; c += 16) {
                const __mmask16 lanes = lanes_from(c, channels);
                const auto load = [&](const std::vector<float>& from) { return _mm512_maskz_loadu_ps(lanes, &from[c]); };
                const __m512 value = _mm512_maskz_loadu_ps(lanes, x + c), scale = load(of.scale);
                const __m512 here = gradient(lanes, value, g + c, scale, load(of.shift));
                const __m512 rest = _mm512_fmadd_ps(_mm512_sub_ps(value, load(of.mean)), load(factor), load(constant));
                _mm512_mask_storeu_ps(to + c, lanes, _mm512_fmadd_ps(here, scale, rest));
            }
    }

    variable_list apply(variable_list&& gradients) override {
        TORCH_CHECK(!at::GradMode::is_enabled(), "compute=codes has no second derivative: use compute=simulate");
        std::lock_guard<std::mutex> lock(mutex_);
        variable_list found(3);
        if (!gradients[0].defined()) return found;
        TORCH_CHECK(saved, torch::autograd::ERR_BACKWARD_TWICE);
        const bool ours = is_ours(gradients[0]);
        const Tensor x = nhwc(saved->unpack()), g = nhwc(gradients[0]);
        const int64_t images = x.size(0), channels = x.size(3), count = x.numel() / channels;
        const float *x_data = x.const_data_ptr<float>(), *g_data = g.const_data_ptr<float>();
        const std::vector<double> sums = this->sums(x_data, g_data, Units(images, count / images, channels));
        if (task_should_compute_output(0)) {
            std::vector<float> factor(channels), constant(channels);
            for (int64_t c = 0; c < channels; c++) {
                const double step = -static_cast<double>(of.scale[c]) / count;
                factor[c] = static_cast<float>(step * sums[channels + c] * of.inverse[c] * of.inverse[c]);
                constant[c] = static_cast<float>(step * sums[c]);
            }
            Tensor of_x = ours ? g : at::empty(x.sizes(), x.options());
            float* to = of_x.mutable_data_ptr<float>();
            const Range range = range_after(to, of_x.numel(), std::max<int64_t>(1, HOT / channels) * channels, [&](int64_t first, int64_t last) {
                differentiate(x_data + first, g_data + first, to + first, (last - first) / channels, factor, constant);
            });
            found[0] = of_x.movedim(-1, 1);
            take_note(found[0], range);
        }
        Tensor of_weight = at::empty({channels}, x.options()), of_bias = at::empty({channels}, x.options());
        for (int64_t c = 0; c < channels; c++) {
            of_weight.mutable_data_ptr<float>()[c] = static_cast<float>(sums[channels + c] * of.inverse[c]);
            of_bias.mutable_data_ptr<float>()[c] = static_cast<float>(sums[c]);
        }
        found[1] = of_weight, found[2] = of_bias;
        return found;
    }
};

// x [N, C, H, W] with the statistics of this batch; moves the running ones
inline Tensor batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor running_mean, Tensor running_variance,
                         double momentum, double eps) {
    Tensor z;
    ChannelConstants of;
    {
        at::AutoDispatchBelowADInplaceOrView below;  // z must not be a view, which a ReLU in place could not modify
        const Tensor from = nhwc(x), factors = weight.contiguous(), terms = bias.contiguous();
        const int64_t images = from.size(0), channels = from.size(3), count = from.numel() / channels;
        const Note* note = note_of(x);
        std::shared_ptr<const Moments> moments = note ? note->moments : nullptr;
        if (!moments) {
            MomentSums sums(Units(images, count / images, channels));
            sums.add_all(from.const_data_ptr<float>());
            moments = std::make_shared<Moments>(sums.moments());
        }
        for (auto* part : {&of.mean, &of.scale, &of.shift}) part->resize(channels);
        for (auto* part : {&of.inverse, &of.excess}) part->resize(channels);
        Tensor mean = at::empty({channels}, from.options()), variance = at::empty({channels}, from.options());
        for (int64_t c = 0; c < channels; c++) {
            of.inverse[c] = 1 / std::sqrt(moments->variance[c] + eps);
            const double scale = factors.const_data_ptr<float>()[c] * of.inverse[c];
            of.mean[c] = static_cast<float>(moments->mean[c]), of.excess[c] = of.mean[c] - moments->mean[c];
            of.scale[c] = static_cast<float>(scale);
            of.shift[c] = static_cast<float>(terms.const_data_ptr<float>()[c] - scale * moments->mean[c]);
            mean.mutable_data_ptr<float>()[c] = of.mean[c];
            variance.mutable_data_ptr<float>()[c] = static_cast<float>(moments->variance[c] * count / (count - 1));
        }
        running_mean.lerp_(mean, momentum), running_variance.lerp_(variance, momentum);
        z = at::empty(from.sizes(), from.options());
        const float* elements = from.const_data_ptr<float>();
        float* to = z.mutable_data_ptr<float>();
        at::parallel_for(0, count, std::max<int64_t>(1, GRAIN / channels), [&](int64_t first, int64_t last) {
            normalise(elements + first * channels, to + first * channels, last - first, channels, of);
        });
        z = z.movedim(-1, 1);
    }
    if (at::GradMode::is_enabled() && torch::autograd::any_variable_requires_grad({x, weight, bias})) {
        auto node = new_node<BatchNormNode>();
        node->saved = std::make_shared<torch::autograd::SavedVariable>(x, false);
        node->of = std::move(of);
        node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
        torch::autograd::set_history(z, node);
    }
    return z;
}

// ---- ReLU ----

inline Tensor relu_after_norm(Tensor x, const std::optional<Tensor>& added, bool inplace) {
    const BatchNormNode* before = inplace && !added ? batch_norm_before<BatchNormNode>(x) : nullptr;
    if (!before) return mask_saving_relu(x, added, inplace);
    const Range range = rectify(x, std::nullopt, x, Tensor());
    auto node = new_node<BatchNormNode>();
    node->of = before->of;
    take_its_place(x, node, *before);
    take_note(x, range);
    return x;
}

}  // namespace bitcycle
