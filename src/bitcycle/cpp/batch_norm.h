// Batch norm in training as PyTorch computes it, bit for bit, with fewer passes over memory, as an autograd node.
//
//     z = a x + b,   a = w s,   b = bias - a m,   s = 1 / sqrt(v + e)        m, v: mean and biased variance of each channel
//     dL/dx = w s (G - mean G - (x - m) s^2 mean(G (x - m))),   G = dL/dz, with a ReLU 0 where z <= 0
//
// Sums run over the rows of [rows, channels] in turn in float32 in each thread, then in float64 over the threads. A ReLU that
// changes z in place takes the place of this node in the graph, and the range of dL/dx is noted for the quantizer that reads it next.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>

#include "node.h"
#include "notes.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define BITCYCLE_BATCH_NORM
#include <immintrin.h>

namespace bitcycle {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr int64_t WIDTH = 16, AHEAD = 1024;  // channels per instruction; elements that are prefetched

inline bool is_channels_last(const at::Tensor& x) {
    return x.dim() == 4 && x.scalar_type() == at::kFloat && x.is_contiguous(at::MemoryFormat::ChannelsLast) && !x.is_contiguous();
}

// Sums of S terms over the rows, [S, channels]; terms_of(channel) returns a function that adds those of 16 channels of a row
template <int S, class TermsOf>
std::vector<double> sum_in_turn(int64_t rows, int64_t channels, const TermsOf& terms_of) {
    std::vector<float> parts(at::get_num_threads() * S * channels);
    at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
        float* sums = &parts[at::get_thread_num() * S * channels];
        const int64_t cached = std::max<int64_t>(1, HOT / channels);
        for (int64_t first = begin; first < end; first += cached)
            for (int64_t channel = 0; channel < channels; channel += WIDTH) {
                const auto terms = terms_of(channel);
                __m512 sum[S];
                for (int i = 0; i < S; i++) sum[i] = _mm512_loadu_ps(sums + i * channels + channel);
                for (int64_t row = first; row < std::min(end, first + cached); row++) terms(row * channels + channel, sum);
                for (int i = 0; i < S; i++) _mm512_storeu_ps(sums + i * channels + channel, sum[i]);
            }
    });
    std::vector<double> all(S * channels);
    for (size_t i = 0; i < parts.size(); i++) all[i % all.size()] += parts[i];
    return all;
}

// Calls work(at, channel) for 16 channels of each row
template <class Work>
void for_rows(int64_t first, int64_t last, int64_t channels, const Work& work) {
    for (int64_t at = first; at < last; at += channels)
        for (int64_t channel = 0; channel < channels; channel += WIDTH) work(at + channel, channel);
}

// z, m and s; moves the running mean and variance
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> normalise_batch(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                                                      at::Tensor running_mean, at::Tensor running_variance, double momentum,
                                                                      double eps) {
    const int64_t channels = x.size(1), rows = x.numel() / channels;
    TORCH_CHECK(is_channels_last(x) && channels % WIDTH == 0 && rows > at::get_num_threads());
    const float* from = x.const_data_ptr<float>();
    at::Tensor mean = at::empty({channels}, x.options()), inverse = at::empty({channels}, x.options());
    std::vector<float> scale(channels), shift(channels);
    const auto load = [](const float* values) { return _mm512_loadu_ps(values); };
    const float share = static_cast<float>(momentum);
    const auto move = [share](at::Tensor& running, int64_t c, auto value) {  // of the mean in float32, of the variance in float64
        float& number = running.mutable_data_ptr<float>()[c];
        number = static_cast<float>(share * value + (1 - share) * number);
    };
    const auto sums = sum_in_turn<1>(rows, channels, [&](int64_t) {
        return [=](int64_t at, __m512(&sum)[1]) {
            __builtin_prefetch(from + at + AHEAD);
            sum[0] = _mm512_add_ps(sum[0], load(from + at));
        };
    });
    float *means = mean.mutable_data_ptr<float>(), *inverses = inverse.mutable_data_ptr<float>();
    for (int64_t c = 0; c < channels; c++) means[c] = static_cast<float>(sums[c] / rows);
    const auto squares = sum_in_turn<1>(rows, channels, [&](int64_t channel) {
        return [=, centre = load(means + channel)](int64_t at, __m512(&sum)[1]) {
            __builtin_prefetch(from + at + AHEAD);
            const __m512 difference = _mm512_sub_ps(load(from + at), centre);
            sum[0] = _mm512_fmadd_ps(difference, difference, sum[0]);
        };
    });
    for (int64_t c = 0; c < channels; c++) {
        const float sum = static_cast<float>(squares[c]), variance = sum / rows;
        inverses[c] = static_cast<float>(1 / std::sqrt(variance + eps));
        scale[c] = inverses[c] * weight.const_data_ptr<float>()[c];
        shift[c] = __builtin_fmaf(-means[c], scale[c], bias.const_data_ptr<float>()[c]);
        move(running_mean, c, means[c]), move(running_variance, c, static_cast<double>(sum / (rows - 1)));
    }
    for (const at::Tensor& running : {running_mean, running_variance}) running.unsafeGetTensorImpl()->bump_version();
    at::Tensor z = at::empty(x.sizes(), x.options(), at::MemoryFormat::ChannelsLast);
    float* to = z.mutable_data_ptr<float>();
    at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / channels), [&](int64_t first, int64_t last) {
        for_rows(first * channels, last * channels, channels, [&](int64_t at, int64_t channel) {
            __builtin_prefetch(from + at + AHEAD);
            _mm512_storeu_ps(to + at, _mm512_fmadd_ps(load(from + at), load(&scale[channel]), load(&shift[channel])));
        });
    });
    return {z, mean, inverse};
}

// Gradients of x (in the memory of g if it is `ours`), weight and bias; g counts only where `passed`, if defined, is not 0
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> differentiate_batch(const at::Tensor& g, const at::Tensor& x, const at::Tensor& weight,
                                                                          const at::Tensor& mean, const at::Tensor& inverse,
                                                                          const at::Tensor& passed, bool ours) {
    const int64_t channels = x.size(1), rows = x.numel() / channels;
    const float *elements = x.const_data_ptr<float>(), *given = g.const_data_ptr<float>();
    const float *means = mean.const_data_ptr<float>(), *inverses = inverse.const_data_ptr<float>();
    const uint8_t* mask = passed.defined() ? passed.const_data_ptr<uint8_t>() : nullptr;
    const auto load = [](const float* values) { return _mm512_loadu_ps(values); };
    const auto gradient = [=](int64_t at) {
        if (!mask) return load(given + at);
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(mask + at));
        return _mm512_maskz_loadu_ps(_mm_test_epi8_mask(bytes, bytes), given + at);
    };
    const auto sums = sum_in_turn<2>(rows, channels, [&](int64_t channel) {
        return [=, centre = load(means + channel)](int64_t at, __m512(&sum)[2]) {
            __builtin_prefetch(elements + at + AHEAD), __builtin_prefetch(given + at + AHEAD);
            const __m512 here = gradient(at);
            sum[0] = _mm512_add_ps(sum[0], here);
            sum[1] = _mm512_fmadd_ps(_mm512_sub_ps(load(elements + at), centre), here, sum[1]);
        };
    });
    at::Tensor of_x = ours ? g : at::empty(x.sizes(), x.options(), at::MemoryFormat::ChannelsLast);
    at::Tensor of_weight = at::empty({channels}, x.options()), of_bias = at::empty({channels}, x.options());
    std::vector<float> share(channels), slope(channels);
    const float count = static_cast<float>(rows);
    for (int64_t c = 0; c < channels; c++) {
        const float sum = static_cast<float>(sums[c]), product = static_cast<float>(sums[channels + c]);
        share[c] = sum / count, slope[c] = product * inverses[c] * inverses[c] / count;
        of_weight.mutable_data_ptr<float>()[c] = product * inverses[c], of_bias.mutable_data_ptr<float>()[c] = sum;
    }
    if (ours) of_x.unsafeGetTensorImpl()->bump_version();
    float* to = of_x.mutable_data_ptr<float>();
    const float* factors = weight.const_data_ptr<float>();
    const int64_t block = std::max<int64_t>(1, HOT / channels) * channels;
    const Range range = range_after(to, x.numel(), block, [&](int64_t first, int64_t last) {
        for_rows(first, last, channels, [&](int64_t at, int64_t channel) {
            __builtin_prefetch(elements + at + AHEAD), __builtin_prefetch(given + at + AHEAD);
            const __m512 rest = _mm512_sub_ps(gradient(at), load(&share[channel]));
            const __m512 centred = _mm512_sub_ps(load(elements + at), load(means + channel));
            const __m512 alone = _mm512_mul_ps(_mm512_fnmadd_ps(centred, load(&slope[channel]), rest), load(inverses + channel));
            _mm512_storeu_ps(to + at, _mm512_mul_ps(alone, load(factors + channel)));
        });
    });
    take_note(of_x, range);
    return {of_x, of_weight, of_bias};
}

struct TrainedBatchNorm : torch::autograd::Node {
    std::shared_ptr<SavedVariable> saved, weight;  // x; shared with a ReLU in place
    SavedVariable passed;                          // by that ReLU
    at::Tensor mean, inverse;
    double eps;
    bool rectified = false;

    std::string name() const override { return "TrainedBatchNorm"; }
    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex_);
        saved.reset(), weight.reset(), passed.reset_data();
    }

    variable_list apply(variable_list&& gradients) override {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!gradients[0].defined()) return variable_list(3);
        TORCH_CHECK(saved, torch::autograd::ERR_BACKWARD_TWICE);
        const bool ours = is_ours(gradients[0]);
        at::Tensor g = gradients[0];
        const at::Tensor from = saved->unpack(), factors = weight->unpack(), mask = passed.unpack();
        std::tuple<at::Tensor, at::Tensor, at::Tensor> found;
        if (!at::GradMode::is_enabled() && is_channels_last(g)) {
            found = differentiate_batch(g, from, factors, mean, inverse, mask, ours);
        } else {  // another layout or, as here, another derivative
            if (mask.defined()) g = at::where(mask.to(at::kBool), g, 0);
            found = at::native_batch_norm_backward(g, from, factors, {}, {}, mean, inverse, true, eps, {true, true, true});
        }
        return {std::get<0>(found), std::get<1>(found), std::get<2>(found)};
    }
};

inline at::Tensor trained_batch_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& running_mean,
                                     const at::Tensor& running_variance, double momentum, double eps) {
    at::Tensor z, mean, inverse;
    {
        at::AutoDispatchBelowADInplaceOrView below;
        std::tie(z, mean, inverse) = normalise_batch(x, weight, bias, running_mean, running_variance, momentum, eps);
    }
    if (at::GradMode::is_enabled() && torch::autograd::any_variable_requires_grad({x, weight, bias})) {
        auto node = new_node<TrainedBatchNorm>();
        node->saved = std::make_shared<SavedVariable>(x, false), node->weight = std::make_shared<SavedVariable>(weight, false);
        node->mean = mean, node->inverse = inverse, node->eps = eps;
        node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
        torch::autograd::set_history(z, node);
    }
    return z;
}

}  // namespace bitcycle

#endif
