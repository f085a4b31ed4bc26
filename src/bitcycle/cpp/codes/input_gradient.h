// Input gradient of a convolution of stride 1 as integer sums with 8-bit AVX-512 VNNI instructions.
//
//     dX[q, c] = sum over o and k of  G[q + padding - k, o] W[o, k, c],       G = g_scale g + g_zero
//
// Every output channel o has its own scale, so the weight becomes a fixed-point number of 16 bits with a scale per input
// channel, W = t_c (256 h + l) with an error of at most t_c / 2 = max |W_c| / 65,278. The sums of g h and g l are exact.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "convolution.h"
#include "weight_gradient.h"

namespace bitcycle {

class FixedPoint {
    static constexpr int32_t MIDDLE = 128, LARGEST = 127 * 256 + 127;  // code of g = 0; largest fixed-point number

    Shape s;  // of the convolution of G: twice as many output channels, 16 h and 16 l in turn
    std::vector<float> high, low;  // 256 t_c g_scale and t_c g_scale
    std::vector<float> rest;       // [H, W, C], the contribution of g_zero
    std::vector<int32_t> starts;   // -128 sum h and -128 sum l

   public:
    static constexpr uint8_t OUTSIDE = MIDDLE;
    std::vector<int8_t> packed;    // as packed_weight

    // weight [O, K, K, C]
    FixedPoint(const Shape& s, const float* weight, double g_scale, double g_zero) : s(s) {
        const int64_t channels = s.out_channels / 2, taps = s.kernel * s.kernel, out = s.channels, terms = taps * out;
        std::vector<float> step(channels), sums(taps * channels);
        for (int64_t i = 0; i < terms; i++)
            for (int64_t c = 0; c < channels; c++) {
                const float size = std::abs(weight[i * channels + c]);
                step[c] = size > step[c] || size != size ? size : step[c];  // nan is sticky
                sums[i % taps * channels + c] += static_cast<float>(g_zero) * weight[i * channels + c];
            }
        for (float& t : step) t = t < 1e-30f ? 1e-30f : t / LARGEST;
        packed.resize(terms * s.out_channels), starts.resize(s.out_channels);
        for (int64_t i = 0; i < terms; i++)
            for (int64_t c = 0; c < channels; c++) {
                const int32_t number = static_cast<int32_t>(std::rint(weight[i * channels + c] / step[c]));
                const int32_t h = (number + 128) >> 8, l = number - 256 * h;
                const int64_t term = (taps - 1 - i % taps) * out + i / taps, first = c / LANES * 2 * LANES + c % LANES;
                int8_t* to = &packed[(c / LANES * 2 * terms + term / 4 * 4) * LANES + c % LANES * 4 + term % 4];
                to[0] = static_cast<int8_t>(h), to[terms * LANES] = static_cast<int8_t>(l);
                starts[first] -= MIDDLE * h, starts[first + LANES] -= MIDDLE * l;
            }
        for (const float t : step) low.push_back(static_cast<float>(t * g_scale)), high.push_back(256 * low.back());
        add_rest(sums, channels);
    }

    void add_rest(const std::vector<float>& sums, int64_t channels) {
        rest.resize(s.places() * channels);
        for (int64_t place = 0; place < s.places(); place++)
            for (int64_t tap = 0; tap < s.kernel * s.kernel; tap++) {
                const int64_t i = s.kernel * s.kernel - 1 - tap;
                const int64_t row = place / s.out_width + i / s.kernel - s.padding, column = place % s.out_width + i % s.kernel - s.padding;
                if (row >= 0 && row < s.height && column >= 0 && column < s.width)
                    accumulate(&sums[tap * channels], channels, &rest[place * channels]);
            }
    }

    void begin_image(const uint8_t*) {}
    void begin_row(int64_t) {}
    __m512i start(int64_t block) const { return _mm512_loadu_si512(&starts[block * LANES]); }

    template <int P, int B>
    [[gnu::always_inline]] void store(const __m512i (&sum)[P][B], int64_t row, int64_t column, int64_t block, float* x) const {
        if constexpr (B == 2) {  // there is no odd block
            const int64_t channels = s.out_channels / 2, first = block / 2 * LANES;
            const __m512 of_high = _mm512_loadu_ps(&high[first]), of_low = _mm512_loadu_ps(&low[first]);
            UNROLL for (int p = 0; p < P; p++) {
                const int64_t at = (row * s.out_width + column + p) * channels + first;
                const __m512 added = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[p][1]), of_low, _mm512_loadu_ps(&rest[at]));
                _mm512_storeu_ps(x + at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[p][0]), of_high, added));
            }
        }
    }
};

// Whether input_gradient computes the one of a convolution with multiples of 16 output channels
inline bool sums_input(int64_t channels, const Shape& s) {
    return channels % LANES == 0 && s.stride == 1 && s.padding < s.kernel && s.kernel * s.kernel * s.out_channels <= MOST_TERMS;
}

// [N, H, W, C] from g [N, H', W', O] and the weight [O, K, K, C]
inline at::Tensor input_gradient(const at::Tensor& g, const at::Tensor& weight, int64_t padding, double g_scale, double g_zero) {
    const int64_t kernel = weight.size(1), channels = weight.size(3), more = kernel - 1 - 2 * padding;
    const Shape s{g.size(0), g.size(1), g.size(2), g.size(3), g.size(1) + more, g.size(2) + more, 2 * channels, kernel, 1, kernel - 1 - padding};
    const FixedPoint numbers(s, weight.const_data_ptr<float>(), g_scale, g_zero);
    at::Tensor x = at::empty({s.images, s.out_height, s.out_width, channels}, weight.options());
    const uint8_t* from = reinterpret_cast<const uint8_t*>(g.const_data_ptr<int8_t>());
    float* to = x.mutable_data_ptr<float>();
    at::parallel_for(0, s.images, 1, [&](int64_t first, int64_t last) {
        Convolution<FixedPoint> convolution(s, numbers.packed.data(), numbers);
        for (int64_t i = first; i < last; i++) convolution.image(from + i * s.x_size(), to + i * s.places() * channels);
    });
    return x;
}

}  // namespace bitcycle
