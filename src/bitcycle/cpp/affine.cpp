// CPU implementation of the affine quantizer of affine.py: bitwise identical results, in PyTorch's threads, as autograd
// nodes.
//
//     n = 2^b - 1,   s = max(r / n, 1e-8),   Q(x) = s rint(clamp((x - z) / s + u, 0, n)) + z
//
// A tensor is viewed as [outer, groups, inner]; each group has its own range over outer and inner. Compile without
// contraction of a * b + c (-ffp-contract=off), which would round once where PyTorch rounds twice.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "affine.h"
#include "node.h"
#include "notes.h"
#include "relu.h"

namespace bitcycle {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

struct Keys {
    const int32_t* layers = nullptr;  // null: round to nearest
    int64_t count = 1;
    int32_t step = 0;
};

struct View {
    int64_t outer, groups, inner;
    int64_t size() const { return outer * groups * inner; }
};

Tensor channels_last(const Tensor& x) { return x.dim() >= 4 ? x.movedim(1, -1).contiguous() : x.contiguous(); }

Tensor unflat(const Tensor& flat, const Tensor& like) { return like.dim() >= 4 ? flat.movedim(-1, 1) : flat; }

// Quantizes x, the elements of `original` in the layout of the view, with one range per group; stores the ranges in `ranges`
// unless it is null. In place if x is `ours`
Tensor quantize(const Tensor& original, const Tensor& x, View view, int64_t bits, const Keys& keys, std::vector<Range>* ranges = nullptr,
                bool ours = false) {
    TORCH_CHECK(x.numel() > 0, "cannot quantize a tensor without elements");
    Tensor y = ours ? x : at::empty(x.sizes(), x.options());
    const float* from = x.const_data_ptr<float>();
    float* to = y.mutable_data_ptr<float>();
    const int64_t step = view.size() / keys.count;  // elements per key
    std::vector<Range> own;
    std::vector<Range>& found = ranges ? *ranges : own;
    found.resize(view.groups);
    const auto noise = [&](int64_t first) {
        return keys.layers ? Noise{true, static_cast<uint32_t>(keys.step ^ keys.layers[first / step]), static_cast<uint32_t>(first % step)}
                           : Noise{};
    };
    if (view.groups == 1) {
        found[0] = noted_range(original, from);
        const Affine affine(found[0], bits);
        at::parallel_for(0, view.size(), GRAIN, [&](int64_t first, int64_t last) {
            quantize_elements(from + first, to + first, last - first, affine, noise(first));
        });
        return y;
    }
    const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, view.outer * view.inner));
    at::parallel_for(0, view.groups, grain, [&](int64_t first, int64_t last) {
        for (int64_t group = first; group < last; group++) {
            Range range;
            for (int64_t i = 0; i < view.outer; i++)
                range.include(serial_range(from + (i * view.groups + group) * view.inner, view.inner));
            found[group] = range;
            const Affine affine(range, bits);
            for (int64_t i = 0; i < view.outer; i++) {
                const int64_t at = (i * view.groups + group) * view.inner;
                quantize_elements(from + at, to + at, view.inner, affine, noise(at));
            }
        }
    });
    return y;
}

int64_t number(const Tensor& scalar) { return *scalar.const_data_ptr<int64_t>(); }
int32_t key(const Tensor& scalar) { return *scalar.const_data_ptr<int32_t>(); }

// ---- backward ----

struct StraightThrough : torch::autograd::Node {
    variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
};

Tensor straight_through(const Tensor& x, Tensor y) {
    if (at::GradMode::is_enabled() && x.requires_grad()) {
        auto node = new_node<StraightThrough>();
        node->set_next_edges(torch::autograd::collect_next_edges(x));
        torch::autograd::set_history(y, node);
    }
    return y;
}

enum class Ranges { TENSOR, POSITIONS, SEQUENCES };

// Quantizes with one range per tensor, per position of [N, positions, F], or per sequence of each time step; straight through, for second derivatives
Tensor quantize_gradient_of(const Tensor& gradient, const Tensor& bits, const Tensor& step_key, const Tensor& layer_keys,
                            bool stochastic, int64_t ranges, bool ours) {
    Tensor y;
    {
        at::NoGradGuard no_grad;
        const Keys keys = stochastic ? Keys{layer_keys.const_data_ptr<int32_t>(), layer_keys.numel(), key(step_key)} : Keys{};
        const bool flat = ranges == static_cast<int64_t>(Ranges::TENSOR);
        const Tensor x = flat ? channels_last(gradient) : gradient.contiguous();
        const int64_t size = x.numel(), first = x.size(0), last = x.size(-1);
        View view{1, 1, size};
        if (ranges == static_cast<int64_t>(Ranges::POSITIONS)) view = {first, size / std::max<int64_t>(1, first * last), last};
        if (ranges == static_cast<int64_t>(Ranges::SEQUENCES)) view = {1, size / std::max<int64_t>(1, last), last};
        y = number(bits) > 0 ? quantize(gradient, x, view, number(bits), keys, nullptr, ours) : x.clone();
        if (ours) y.unsafeGetTensorImpl()->bump_version();  // notes about it are out of date
        y = flat ? unflat(y, gradient) : y;
    }
    return straight_through(gradient, y);
}

Tensor quantize_gradient(const Tensor& gradient, const Tensor& bits, const Tensor& step_key, const Tensor& layer_keys,
                         bool stochastic, int64_t ranges) {
    return quantize_gradient_of(gradient, bits, step_key, layer_keys, stochastic, ranges, false);
}

struct QuantizeGradient : torch::autograd::Node {
    Tensor bits, step_key, layer_keys;
    bool stochastic;
    int64_t ranges;

    variable_list apply(variable_list&& gradients) override {
        if (!gradients[0].defined()) return std::move(gradients);
        return {quantize_gradient_of(gradients[0], bits, step_key, layer_keys, stochastic, ranges, is_ours(gradients[0]))};
    }
};

// Returns x (same memory), whose gradient will be quantized
Tensor with_quantized_gradient(const Tensor& x, const Tensor& bits, const Tensor& step_key, const Tensor& layer_keys,
                               bool stochastic, int64_t ranges) {
    Tensor y;
    {
        at::AutoDispatchBelowADInplaceOrView below;  // not a view, which a subsequent in-place ReLU could not modify
        y = x.detach();
    }
    if (at::GradMode::is_enabled() && x.requires_grad()) {
        auto node = new_node<QuantizeGradient>();
        node->bits = bits, node->step_key = step_key, node->layer_keys = layer_keys;
        node->stochastic = stochastic, node->ranges = ranges;
        node->set_next_edges(torch::autograd::collect_next_edges(x));
        torch::autograd::set_history(y, node);
    }
    return y;
}

// ---- forward ----

// One range per tensor; updates the running range
Tensor quantize_and_observe(const Tensor& x, const Tensor& bits, Tensor running_zero_point, Tensor running_range, double momentum) {
    Tensor y;
    {
        at::NoGradGuard no_grad;
        const int64_t b = number(bits);
        const Tensor flat = channels_last(x);
        if (b <= 0) {
            y = unflat(flat.clone(), x);
        } else {
            std::vector<Range> ranges;
            y = unflat(quantize(x, flat, {1, 1, flat.numel()}, b, {}, &ranges), x);
            observe(running_zero_point, running_range, ranges[0], momentum);
        }
    }
    return straight_through(x, y);
}

// Quantizes within a given range
Tensor quantize_clamped(const Tensor& x, const Tensor& bits, const Tensor& zero_point, const Tensor& value_range) {
    Tensor y;
    {
        at::NoGradGuard no_grad;
        const Tensor flat = channels_last(x);
        y = number(bits) > 0 ? at::empty(flat.sizes(), flat.options()) : flat.clone();
        const Affine affine(zero_point.item<float>(), value_range.item<float>(), number(bits));
        const float* from = flat.const_data_ptr<float>();
        float* to = y.mutable_data_ptr<float>();
        if (number(bits) > 0)
            at::parallel_for(0, flat.numel(), GRAIN, [&](int64_t first, int64_t last) {
                quantize_elements(from + first, to + first, last - first, affine, Noise{});
            });
        y = unflat(y, x);
    }
    return straight_through(x, y);
}

// One range per row: per index of dimension 0 (of a weight), or over the last dimension
Tensor quantize_rows(const Tensor& x, const Tensor& bits, bool of_weight) {
    Tensor y;
    {
        at::NoGradGuard no_grad;
        const Tensor flat = of_weight ? channels_last(x) : x.contiguous();
        if (number(bits) <= 0) {
            y = flat.clone();
        } else {
            const int64_t rows = of_weight ? x.size(0) : x.numel() / std::max<int64_t>(1, x.size(-1));
            y = quantize(x, flat, {1, rows, x.numel() / std::max<int64_t>(1, rows)}, number(bits), {});
        }
        y = of_weight ? unflat(y, x) : y;
    }
    return straight_through(x, y);
}

// Updates `running` with the values in turn, with the summation order of PyTorch
void observe_in_turn(Tensor running, const Tensor& values, double momentum) {
    const int64_t count = values.numel();
    const Tensor weights = at::pow(momentum, at::arange(count - 1, -1, -1, values.options()));
    running.copy_(running * std::pow(momentum, count) + (weights * values).sum() * (1 - momentum));
}

// Quantizes x [T, N, F] with one range per time step; updates the running range with each in turn
Tensor quantize_sequence(const Tensor& x, const Tensor& bits, Tensor running_zero_point, Tensor running_range, double momentum) {
    Tensor y;
    {
        at::NoGradGuard no_grad;
        const Tensor flat = x.contiguous();
        if (number(bits) <= 0) {
            y = flat.clone();
        } else {
            const int64_t steps = x.size(0);
            std::vector<Range> ranges;
            y = quantize(x, flat, {1, steps, x.numel() / std::max<int64_t>(1, steps)}, number(bits), {}, &ranges);
            if (steps == 1) {
                observe(running_zero_point, running_range, ranges[0], momentum);
            } else {
                Tensor limits = at::empty({2, steps}, flat.options());
                for (int64_t t = 0; t < steps; t++) {
                    limits.mutable_data_ptr<float>()[t] = ranges[t].low;
                    limits.mutable_data_ptr<float>()[steps + t] = ranges[t].high - ranges[t].low;
                }
                observe_in_turn(running_zero_point, limits[0], momentum);
                observe_in_turn(running_range, limits[1], momentum);
            }
        }
    }
    return straight_through(x, y);
}

// ---- gates ----

// Products of the rows of x [N, F] with those of K others, [K, N]: rounded and added as by PyTorch, but in the cache
Tensor products_of_rows(const Tensor& x, at::TensorList others) {
    const int64_t rows = x.size(0);
    Tensor found = at::empty({static_cast<int64_t>(others.size()), rows}, x.options());
    at::parallel_for(0, rows, 1, [&](int64_t first, int64_t last) {
        at::AutoDispatchBelowADInplaceOrView below;
        Tensor terms = at::empty({1, x.size(1)}, x.options());
        for (int64_t row = first; row < last; row++)
            for (size_t k = 0; k < others.size(); k++) {
                at::mul_out(terms, x.narrow(0, row, 1), others[k].narrow(0, row, 1));
                found.mutable_data_ptr<float>()[k * rows + row] = terms.sum(1).item<float>();
            }
    });
    return found;
}

}  // namespace
}  // namespace bitcycle

TORCH_LIBRARY_FRAGMENT(bitcycle, library) {
    library.def("quantize_and_observe", &bitcycle::quantize_and_observe);
    library.def("quantize_clamped", &bitcycle::quantize_clamped);
    library.def("mask_saving_relu", &bitcycle::mask_saving_relu);
#ifdef BITCYCLE_BATCH_NORM
    library.def("normalise_batch", &bitcycle::normalise_batch);
    library.def("differentiate_batch", &bitcycle::differentiate_batch);
    library.def("trained_batch_norm", &bitcycle::trained_batch_norm);
#endif
    library.def("products_of_rows", &bitcycle::products_of_rows);
    library.def("quantize_rows", &bitcycle::quantize_rows);
    library.def("quantize_sequence", &bitcycle::quantize_sequence);
    library.def("quantize_gradient", &bitcycle::quantize_gradient);
    library.def("with_quantized_gradient", &bitcycle::with_quantized_gradient);
}
