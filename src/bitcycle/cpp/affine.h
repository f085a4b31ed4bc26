// Ranges, steps and rounding of the affine quantizer, element by element; see affine.cpp.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace bitcycle {

constexpr int64_t GRAIN = 1 << 15;  // minimum elements per thread

struct Range {
    float low = std::numeric_limits<float>::infinity(), high = -std::numeric_limits<float>::infinity();

    void include(const Range& other) {  // nan is sticky
        low = other.low < low || other.low != other.low ? other.low : low;
        high = other.high > high || other.high != other.high ? other.high : high;
    }
};

inline Range serial_range(const float* x, int64_t count) {
    constexpr int64_t LANES = 64, AHEAD = 1024;  // the processor itself prefetches no further than a page of memory
    Range range;
    int64_t i = 0;
    if (count >= LANES) {
        float low[LANES], high[LANES], sum[LANES] = {};
        std::copy(x, x + LANES, low), std::copy(x, x + LANES, high);
        for (; i + LANES <= count; i += LANES) {
            for (int64_t lane = 0; lane < LANES; lane += 16) __builtin_prefetch(x + i + AHEAD + lane);
            for (int64_t lane = 0; lane < LANES; lane++) {
                const float value = x[i + lane];
                low[lane] = value < low[lane] ? value : low[lane];
                high[lane] = value > high[lane] ? value : high[lane];
                sum[lane] += value - value;  // 0, or nan after the first nan or infinity
            }
        }
        for (int64_t lane = 0; lane < LANES; lane++) {
            range.include({low[lane], high[lane]});
            if (sum[lane] != 0)  // distinguish nan from infinity element by element
                for (int64_t j = lane; j < i; j += LANES) range.include({x[j], x[j]});
        }
    }
    for (; i < count; i++) range.include({x[i], x[i]});
    return range;
}

// Minimum and maximum; nan if there is any nan
inline Range range_of(const float* x, int64_t count) {
    if (count <= GRAIN || at::get_num_threads() == 1) return serial_range(x, count);
    std::vector<Range> parts(at::get_num_threads());
    at::parallel_for(0, count, GRAIN, [&](int64_t first, int64_t last) {
        parts[at::get_thread_num()].include(serial_range(x + first, last - first));
    });
    Range range;
    for (const Range& part : parts) range.include(part);
    return range;
}

// Moves the running range towards that of this batch
inline void observe(at::Tensor& running_zero_point, at::Tensor& running_range, const Range& range, double momentum) {
    const auto move = [&](at::Tensor& running, float value) {
        running.fill_(running.item<float>() * static_cast<float>(momentum) + value * static_cast<float>(1 - momentum));
    };
    move(running_zero_point, range.low), move(running_range, range.high - range.low);
}

struct Affine {
    float zero_point, scale, levels;

    Affine(float low, float value_range, int64_t bits) : zero_point(low) {
        levels = static_cast<float>((int64_t{1} << bits) - 1);
        const float step = value_range / levels, least = 1e-8f;
        scale = step < least ? least : step;  // nan stays nan
    }
    Affine(const Range& range, int64_t bits) : Affine(range.low, range.high - range.low, bits) {}

    float code(float x, float noise) const {
        float code = (x - zero_point) / scale + noise;
        code = code < 0 ? 0 : code;
        return __builtin_rintf(code > levels ? levels : code);
    }
    float code(float x) const {
        float code = (x - zero_point) / scale;
        code = code < 0 ? 0 : code;
        return __builtin_rintf(code > levels ? levels : code);
    }
};

// randomness.hash_bits: well-mixed bits of a counter and a key
inline uint32_t mixed(uint32_t counter, uint32_t key) {
    uint32_t bits = counter ^ key;
    bits ^= bits >> 16;
    bits *= 0x7FEB352Du;
    bits ^= bits >> 15;
    bits = (bits + key) * 0x846CA68Bu;
    return bits ^ bits >> 16;
}

// Noise of elements, starting at counter `first`
struct Noise {
    bool is_there = false;
    uint32_t key = 0, first = 0;

    float at(uint32_t counter) const { return static_cast<float>(static_cast<int32_t>(mixed(counter, key) >> 8)) * 0x1p-24f - 0.5f; }
};

// `to` may be `from`
inline void quantize_elements(const float* from, float* to, int64_t count, Affine affine, Noise noise) {
    if (noise.is_there) {
#pragma GCC ivdep
        for (int64_t i = 0; i < count; i++)
            to[i] = affine.code(from[i], noise.at(noise.first + static_cast<uint32_t>(i))) * affine.scale + affine.zero_point;
    } else {
#pragma GCC ivdep
        for (int64_t i = 0; i < count; i++) to[i] = affine.code(from[i]) * affine.scale + affine.zero_point;
    }
}

}  // namespace bitcycle
