// CPU implementation of quantizers with one scale per block (block.py, mx.py, nvfp4.py): bitwise identical results, in
// PyTorch's threads, without copies into and out of blocks.
//
// A tensor is viewed as [rows, length, inner]; a block has `size` consecutive elements along `length`, and the last
// block of a row may be shorter. Noise counters include its padding. Before it is quantized, a tensor may be rotated along
// `length` (hadamard.h), piece by piece so that what is rotated is read from the cache. A square has `size` consecutive elements
// along the innermost dimension, too. Compile without contraction of a * b + c, as affine.cpp.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "affine.h"
#include "hadamard.h"

namespace bitcycle {
namespace {

using at::Tensor;

inline uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu; }  // ordered as |x|, nan last
inline int32_t exponent_of(uint32_t bits) { return static_cast<int32_t>(bits >> 23 & 0xFF) - 127; }
inline float power_of_two(int32_t exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23); }
constexpr uint32_t INFINITE = 0x7F800000u;

inline float clamped(float x, float largest) {  // nan stays nan
    x = x < -largest ? -largest : x;
    return x > largest ? largest : x;
}

struct Element {
    int32_t mantissa, lowest, highest;
    float largest;

    template <class... Added>
    float round(float x, Added... noise) const {
        x = clamped(x, largest);
        const int32_t unit = std::max(exponent_of(magnitude(x)), lowest) - mantissa;
        const float code = x * power_of_two(-unit);
        return clamped(__builtin_rintf((code + ... + noise)) * power_of_two(unit), largest);
    }
};

constexpr Element E4M3{3, -6, 8, 448.0f};

// Scales of up to `LANES` blocks, one array per factor so that loops over blocks are vectorized: powers of two (MX), or E4M3
// numbers times the scale of the tensor (NVFP4)
constexpr int64_t LANES = 64;

struct PowerOfTwo {
    float down1[LANES], down2[LANES], up1[LANES], up2[LANES], headroom;

    PowerOfTwo(const uint32_t* top, int64_t count, const Element& element, float headroom) : headroom(headroom) {
        for (int64_t i = 0; i < count; i++) {
            const int32_t exponent = exponent_of(top[i]), shared = std::max(exponent - element.highest, -127), half = shared >> 1;
            down1[i] = power_of_two(-half), down2[i] = power_of_two(half - shared), up2[i] = power_of_two(shared - half);
            up1[i] = exponent > 127 ? std::numeric_limits<float>::quiet_NaN() : power_of_two(half);
        }
    }
    template <class... Added>
    float apply(int64_t i, float x, const Element& element, Added... noise) const {
        if constexpr (sizeof...(noise) > 0)
            return element.round(x * down1[i] * down2[i] * headroom, noise...) * up1[i] * up2[i] / headroom;
        else
            return element.round(x * down1[i] * down2[i]) * up1[i] * up2[i];
    }
};

struct OfTensor {
    float step[LANES], inverse[LANES], zero[LANES], lift;  // zero: 0, which makes a block of step 0 positive, or -0, without effect

    OfTensor(const uint32_t* top, int64_t count, const Element& element, float of_tensor) {
        lift = of_tensor < 0x1p-64f ? 0x1p64f : 1.0f;  // exact; without it 1 / of_tensor could be infinite
        const float unscaled = 1.0f / (of_tensor * lift);
        for (int64_t i = 0; i < count; i++) {
            const float scale = E4M3.round(std::bit_cast<float>(top[i]) / element.largest / of_tensor), found = scale * of_tensor;
            inverse[i] = found > 0 ? unscaled / scale : 0.0f, zero[i] = found > 0 ? -0.0f : 0.0f;
            step[i] = top[i] >= INFINITE ? std::numeric_limits<float>::quiet_NaN() : found;
        }
    }
    template <class... Added>
    float apply(int64_t i, float x, const Element& element, Added... noise) const {
        return step[i] * element.round(x * lift * inverse[i] + zero[i], noise...);
    }
};

struct Shape {
    int64_t rows, length, inner, size;
    int64_t side;  // of squares, which `width` consecutive elements are divided into; 0: blocks
    int64_t width;
    int64_t blocks() const { return (length + size - 1) / size; }  // per row
};

// `blocks` blocks of contiguous elements of one row; the last one may be shorter. SIZE: elements of a whole block if they are known
// to the compiler, else 0
template <class Scale, bool STOCHASTIC, int64_t SIZE>
void quantize_contiguous(const float* from, float* to, int64_t blocks, int64_t size, int64_t length, const Element element, float factor, Noise noise) {
    const auto for_each = [&](int64_t block, const auto& work) {
        const int64_t first = block * size, last = std::min(length, first + size);
        if (SIZE && first + SIZE == last) {
#pragma GCC ivdep
            for (int64_t i = 0; i < SIZE; i++) work(first + i);
        } else {
#pragma GCC ivdep
            for (int64_t i = first; i < last; i++) work(i);
        }
    };
    uint32_t tops[LANES];
    for (int64_t block = 0; block < blocks; block++) {
        uint32_t top = 0;
        for_each(block, [&](int64_t i) { top = std::max(top, magnitude(from[i])); });
        tops[block] = top;
    }
    const Scale scale(tops, blocks, element, factor);
    for (int64_t block = 0; block < blocks; block++)
        for_each(block, [&](int64_t i) {
            if constexpr (STOCHASTIC)
                to[i] = scale.apply(block, from[i], element, noise.at(noise.first + static_cast<uint32_t>(i)));
            else
                to[i] = scale.apply(block, from[i], element);
        });
}

// Blocks of `count` strided elements, or squares of `count` rows, `LANES` columns at a time; the loop is vectorized only with a
// copy of `element`, which writing to `to` cannot change
template <class Scale, bool STOCHASTIC>
void quantize_across(const float* from, float* to, int64_t count, Shape shape, const Element element, float factor, Noise noise) {
    const int64_t inner = shape.inner, step = shape.side ? LANES / shape.side * shape.side : LANES;
    for (int64_t start = 0, lanes; start < inner; start += lanes) {
        lanes = std::min(step, shape.width - start % shape.width);
        uint32_t top[LANES] = {};
        for (int64_t i = 0; i < count; i++)
            for (int64_t lane = 0; lane < lanes; lane++) top[lane] = std::max(top[lane], magnitude(from[i * inner + start + lane]));
        for (int64_t lane = 0; shape.side && lane < lanes; lane += shape.side) {
            uint32_t* last = top + std::min(lanes, lane + shape.side);
            std::fill(top + lane, last, *std::max_element(top + lane, last));
        }
        const Scale scale(top, lanes, element, factor);
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = i * inner + start;
#pragma GCC ivdep
            for (int64_t lane = 0; lane < lanes; lane++)
                if constexpr (STOCHASTIC)
                    to[at + lane] = scale.apply(lane, from[at + lane], element, noise.at(noise.first + static_cast<uint32_t>(at + lane)));
                else
                    to[at + lane] = scale.apply(lane, from[at + lane], element);
        }
    }
}

// Blocks `first` to `last` - 1, numbered over all rows
template <class Scale, bool STOCHASTIC>
void quantize(const float* from, float* to, int64_t first, int64_t last, Shape shape, const Element& element, float factor, uint32_t key) {
    const int64_t blocks = shape.blocks(), area = shape.size * shape.inner;
    for (int64_t block = first, together = 1; block < last; block += together) {
        const int64_t start = block % blocks * shape.size, at = (block / blocks * shape.length + start) * shape.inner;
        const Noise noise{STOCHASTIC, key, static_cast<uint32_t>(block * area)};
        if (shape.inner == 1) {
            together = std::min({LANES, last - block, blocks - block % blocks});
            const auto function = shape.size == 16   ? quantize_contiguous<Scale, STOCHASTIC, 16>
                                  : shape.size == 32 ? quantize_contiguous<Scale, STOCHASTIC, 32>
                                                     : quantize_contiguous<Scale, STOCHASTIC, 0>;
            function(from + at, to + at, together, shape.size, shape.length - start, element, factor, noise);
        } else {
            quantize_across<Scale, STOCHASTIC>(from + at, to + at, std::min(shape.size, shape.length - start), shape, element, factor, noise);
        }
    }
}

// Scale of the tensor, which maps its largest finite magnitude to the end of the range
float scale_of_tensor(const float* x, int64_t count, const Element& element) {
    uint32_t top = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t found = magnitude(x[i]);
        top = std::max(top, found & -static_cast<uint32_t>(found < INFINITE));
    }
    const float scale = std::bit_cast<float>(top) / (element.largest * E4M3.largest);
    return scale > 0 ? scale : 1.0f;
}

// Calls work(row, start, count) for pieces of rows, each a multiple of `unit` elements along `length`
template <class Work>
void for_pieces(const Shape& shape, int64_t unit, const Work& work) {
    constexpr int64_t PIECE = 1 << 12;
    const int64_t piece = unit * std::max<int64_t>(1, PIECE / (unit * shape.inner)), pieces = (shape.length + piece - 1) / piece;
    at::parallel_for(0, shape.rows * pieces, std::max<int64_t>(1, GRAIN / (piece * shape.inner)), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) work(i / pieces, i % pieces * piece, std::min(piece, shape.length - i % pieces * piece));
    });
}

// x in blocks of the format that `bits` select, along `dim`, separately in `groups` equal parts. formats [33, 6]: mantissa, lowest,
// highest and largest of the element, elements per block, and whether there is a scale of the tensor; headroom: factor of the
// elements of MX formats while they are rounded stochastically; turn, turn_key: size of the rotation before it, 0 for none, and
// the key of its signs; squares: of a weight, whose second dimension is its other side, with `dim` 0
Tensor quantize_blocks(const Tensor& x, const Tensor& bits, const Tensor& formats, int64_t dim, int64_t groups, const std::optional<Tensor>& key,
                       double headroom, int64_t turn, const std::optional<Tensor>& turn_key, bool squares) {
    at::NoGradGuard no_grad;
    const bool is_image = x.dim() >= 4;
    const Tensor ordered = is_image ? x.movedim(1, -1).contiguous() : x.contiguous();
    dim = dim < 0 ? dim + x.dim() : dim;
    const int64_t position = !is_image ? dim : dim == 1 ? x.dim() - 1 : std::max<int64_t>(dim - 1, 0);
    int64_t inner = 1;
    for (int64_t i = position + 1; i < x.dim(); i++) inner *= ordered.size(i);
    const int64_t length = ordered.size(position) / groups, number = *bits.const_data_ptr<int64_t>();
    const float* row = formats.const_data_ptr<float>() + 6 * number;
    const Element element{static_cast<int32_t>(row[0]), static_cast<int32_t>(row[1]), static_cast<int32_t>(row[2]), row[3]};
    const int64_t size = std::min(static_cast<int64_t>(row[4]), length), side = squares ? static_cast<int64_t>(row[4]) : 0;
    const Shape shape{x.numel() / (length * inner), length, inner, size, side, squares ? x.size(1) : inner};

    Tensor y = number > 0 || turn > 0 ? at::empty(ordered.sizes(), ordered.options()) : ordered.clone();
    const float* from = ordered.const_data_ptr<float>();
    float* to = y.mutable_data_ptr<float>();
    std::optional<Rotation> rotation;
    if (turn > 0) rotation.emplace(turn, static_cast<uint32_t>(*turn_key->const_data_ptr<int32_t>()));
    const auto rotate = [&](int64_t row, int64_t start, int64_t count) {
        const int64_t at = (row * length + start) * inner;
        rotation->apply(from + at, to + at, count, inner);
    };
    if (turn > 0 && (number == 0 || row[5])) {  // the largest magnitude is that of the rotated tensor
        for_pieces(shape, turn, rotate);
        from = to, rotation.reset();
    }
    if (number > 0) {
        const float factor = row[5] ? scale_of_tensor(from, x.numel(), element) : static_cast<float>(headroom);
        const auto function = row[5] ? (key ? quantize<OfTensor, true> : quantize<OfTensor, false>)
                                     : (key ? quantize<PowerOfTwo, true> : quantize<PowerOfTwo, false>);
        const auto noise_key = key ? static_cast<uint32_t>(*key->const_data_ptr<int32_t>()) : 0;
        for_pieces(shape, rotation ? std::lcm(size, turn) : size, [&](int64_t row, int64_t start, int64_t count) {
            if (rotation) rotate(row, start, count);
            const int64_t first = row * shape.blocks() + start / size;
            function(rotation ? to : from, to, first, first + (count + size - 1) / size, shape, element, factor, noise_key);
        });
    }
    return is_image ? y.movedim(-1, 1) : y;
}

}  // namespace
}  // namespace bitcycle

TORCH_LIBRARY_FRAGMENT(bitcycle, library) {
    library.def(
        "quantize_blocks(Tensor x, Tensor bits, Tensor formats, int dim, int groups, Tensor? key=None, float headroom=1, int turn=0, "
        "Tensor? turn_key=None, bool squares=False) -> Tensor",
        &bitcycle::quantize_blocks);
}
