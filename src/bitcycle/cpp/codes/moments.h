// Sums over the rows of [rows, channels] for batch norm, with AVX-512 instructions.
//
// Rows are summed in float32 in units of fixed size, and units in float64 in a fixed order: results depend neither on the
// number of threads nor on the operator that sums, which is the convolution while an image is in the cache, or batch norm.

#pragma once

#include <ATen/Parallel.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace bitcycle {

// The first lanes of a register, for the channels from `channel` on
inline __mmask16 lanes_from(int64_t channel, int64_t channels) {
    return channels - channel >= 16 ? 0xFFFF : static_cast<__mmask16>((1 << (channels - channel)) - 1);
}

struct Moments {
    std::vector<double> mean, variance;  // per channel; the variance is the biased one
};

// Units of rows within the images of a tensor [images, places, channels]
struct Units {
    int64_t images, places, channels, rows, per_image;

    Units(int64_t images, int64_t places, int64_t channels) : images(images), places(places), channels(channels) {
        constexpr int64_t CACHED = 1 << 15;  // elements
        rows = std::max<int64_t>(1, CACHED / channels), per_image = (places + rows - 1) / rows;
    }
    int64_t count() const { return images * per_image; }
    int64_t first(int64_t unit) const { return unit / per_image * places + unit % per_image * rows; }
    int64_t size(int64_t unit) const { return std::min(rows, places - unit % per_image * rows); }
};

// Sums of two terms over the rows, into sums [2, channels]; terms_of(channel, lanes) adds those of 16 channels of a row
template <class Terms>
void sum_rows(int64_t rows, int64_t channels, float* sums, const Terms& terms_of) {
    constexpr int64_t APART = 4;  // sums that do not wait for each other
    for (int64_t channel = 0; channel < channels; channel += 16) {
        const __mmask16 lanes = lanes_from(channel, channels);
        const auto terms = terms_of(channel, lanes);
        __m512 a[APART], b[APART];
        for (int64_t i = 0; i < APART; i++) a[i] = b[i] = _mm512_setzero_ps();
        int64_t row = 0;
        for (; row + APART <= rows; row += APART)
            for (int64_t i = 0; i < APART; i++) terms((row + i) * channels + channel, a[i], b[i]);
        for (; row < rows; row++) terms(row * channels + channel, a[0], b[0]);
        _mm512_mask_storeu_ps(sums + channel, lanes, _mm512_add_ps(_mm512_add_ps(a[0], a[1]), _mm512_add_ps(a[2], a[3])));
        _mm512_mask_storeu_ps(sums + channels + channel, lanes, _mm512_add_ps(_mm512_add_ps(b[0], b[1]), _mm512_add_ps(b[2], b[3])));
    }
}

// Collects sums of x - x_0 and (x - x_0)^2 per unit, x_0 being its first row, and combines them (Chan et al. 1979)
class MomentSums {
    Units units;
    std::vector<float> sums;  // [units, 3, channels]

   public:
    explicit MomentSums(const Units& units) : units(units), sums(units.count() * 3 * units.channels) {}

    void add(const float* x, int64_t unit) {
        const float* from = x + units.first(unit) * units.channels;
        float* to = &sums[unit * 3 * units.channels];
        std::copy(from, from + units.channels, to + 2 * units.channels);
        sum_rows(units.size(unit), units.channels, to, [&](int64_t channel, __mmask16 lanes) {
            const __m512 first = _mm512_maskz_loadu_ps(lanes, from + channel);
            return [=](int64_t at, __m512& sum, __m512& squares) {
                const __m512 difference = _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, from + at), first);
                sum = _mm512_add_ps(sum, difference);
                squares = _mm512_fmadd_ps(difference, difference, squares);
            };
        });
    }
    void add_image(const float* x, int64_t image) {
        for (int64_t i = 0; i < units.per_image; i++) add(x, image * units.per_image + i);
    }
    void add_all(const float* x) {
        at::parallel_for(0, units.count(), 1, [&](int64_t first, int64_t last) {
            for (int64_t unit = first; unit < last; unit++) add(x, unit);
        });
    }

    Moments moments() const {
        const int64_t channels = units.channels;
        Moments all{std::vector<double>(channels), std::vector<double>(channels)};
        double count = 0;
        for (int64_t unit = 0; unit < units.count(); unit++) {
            const double size = units.size(unit), total = count + size;
            const float *sum = &sums[unit * 3 * channels], *squares = sum + channels, *first = squares + channels;
            for (int64_t c = 0; c < channels; c++) {
                const double shift = sum[c] / size, difference = first[c] + shift - all.mean[c];
                all.mean[c] += difference * (size / total);
                all.variance[c] += squares[c] - shift * sum[c] + difference * difference * (count * size / total);
            }
            count = total;
        }
        for (double& variance : all.variance) variance = std::max(variance, 0.0) / count;  // nan stays: max(nan, 0) is nan
        return all;
    }
};

}  // namespace bitcycle
