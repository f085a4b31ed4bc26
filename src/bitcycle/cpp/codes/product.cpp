// compute=codes for convolutions on a CPU with 8-bit products: quantization, product and gradients as one autograd
// node.
// See product.py for the equations.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "batch_norm.h"
#include "convolution.h"
#include "input_gradient.h"
#include "weight_gradient.h"

namespace bitcycle {
namespace {

using torch::autograd::AutogradContext;

int64_t number(const Tensor& scalar) { return *scalar.const_data_ptr<int64_t>(); }
int32_t key(const Tensor& scalar) { return *scalar.const_data_ptr<int32_t>(); }

// Separate loops, without dependences between elements: writes through byte pointers may alias anything

void encode_elements(const float* __restrict from, uint8_t* __restrict to, int64_t count, Affine affine) {
    for (int64_t i = 0; i < count; i++) to[i] = static_cast<uint8_t>(static_cast<int32_t>(affine.code(from[i])));
}

// Centred codes, and the decoded values unless `to` is null; noise_of(i) is that of element i
template <class NoiseOf>
void encode_centred(const float* __restrict from, float* __restrict to, int8_t* __restrict codes, int64_t count, Affine affine,
                    float middle, const NoiseOf& noise_of) {
    for (int64_t i = 0; i < count; i++) {
        const float code = affine.code(from[i], noise_of(i));
        if (to) to[i] = code * affine.scale + affine.zero_point;
        codes[i] = static_cast<int8_t>(static_cast<int32_t>(code - middle));
    }
}

float no_noise(int64_t) { return 0; }

// Codes with zeros as further channels up to a multiple of 16
Tensor padded(const Tensor& integers) {
    const int64_t missing = (LANES - integers.size(-1) % LANES) % LANES, limits[] = {0, missing};
    return missing ? at::constant_pad_nd(integers, limits) : integers;
}

struct Weight {
    Tensor integers, decoded, scale, zero_point;  // [O, K, K, C] int8 and float32, [O] twice
};

// One range per output channel
Weight encode_weight(const Tensor& weight, int64_t bits) {
    const Tensor rows = nhwc(weight);
    const int64_t out = rows.size(0), terms = rows.numel() / out;
    Weight w{at::empty(rows.sizes(), rows.options().dtype(at::kChar)), at::empty(rows.sizes(), rows.options()),
             at::empty({out}, rows.options()), at::empty({out}, rows.options())};
    const float middle = static_cast<float>(int64_t{1} << (bits - 1));
    for (int64_t o = 0; o < out; o++) {
        const float* from = rows.const_data_ptr<float>() + o * terms;
        int8_t* integers = w.integers.mutable_data_ptr<int8_t>() + o * terms;
        float* decoded = w.decoded.mutable_data_ptr<float>() + o * terms;
        const Affine affine(serial_range(from, terms), bits);
        encode_centred(from, decoded, integers, terms, affine, middle, no_noise);
        w.scale.mutable_data_ptr<float>()[o] = affine.scale;
        w.zero_point.mutable_data_ptr<float>()[o] = affine.zero_point + middle * affine.scale;
    }
    return w;
}

Tensor encode(const Tensor& x, const Affine& affine) {
    Tensor integers = at::empty(x.sizes(), x.options().dtype(at::kByte));
    const float* from = x.const_data_ptr<float>();
    uint8_t* to = integers.mutable_data_ptr<uint8_t>();
    at::parallel_for(0, x.numel(), GRAIN, [&](int64_t first, int64_t last) {
        encode_elements(from + first, to + first, last - first, affine);
    });
    return integers;
}

// Codes of a gradient [N, H', W', O], and the quantized gradient if it is to be decoded
std::pair<Tensor, Tensor> encode_gradient(const Tensor& gradient, const Affine& affine, int64_t bits, const Noise& noise, bool decode) {
    const Tensor quantized = decode ? at::empty(gradient.sizes(), gradient.options()) : Tensor();
    const Tensor integers = at::empty(gradient.sizes(), gradient.options().dtype(at::kChar));
    const float middle = static_cast<float>(int64_t{1} << (bits - 1));
    at::parallel_for(0, gradient.numel(), GRAIN, [&](int64_t first, int64_t last) {
        const float* from = gradient.const_data_ptr<float>() + first;
        float* to = decode ? quantized.mutable_data_ptr<float>() + first : nullptr;
        int8_t* codes = integers.mutable_data_ptr<int8_t>() + first;
        const auto noise_of = [&](int64_t i) { return noise.at(static_cast<uint32_t>(first + i)); };
        if (noise.is_there) encode_centred(from, to, codes, last - first, affine, middle, noise_of);
        else encode_centred(from, to, codes, last - first, affine, middle, no_noise);
    });
    return {quantized, integers};
}

// Terms added to the products: bias, and the contribution of x's zero point inside the image
Tensor rest_of(const Tensor& bias, const Weight& w, float zero_point, const Shape& s) {
    Tensor rest = bias.defined() ? bias.detach().contiguous() : at::zeros({s.out_channels}, w.scale.options());
    if (zero_point == 0) return rest;
    const Tensor sums = w.decoded.movedim(-1, 1).sum({1}, true), inside = at::ones({1, 1, s.height, s.width}, rest.options());
    const Tensor added = at::conv2d(inside, sums, {}, {s.stride, s.stride}, {s.padding, s.padding}) * zero_point;
    return (added[0].movedim(0, -1) + rest).contiguous();
}

// `moments`, unless null, become those of the output
Tensor convolve(const Tensor& integers, const Affine& affine, const Weight& w, const Tensor& bias, const Shape& s,
                std::shared_ptr<const Moments>* moments) {
    const Tensor rest = rest_of(bias, w, affine.zero_point, s);
    const Tensor scales = w.scale * affine.scale, offsets = w.zero_point * affine.scale;
    const auto packed = packed_weight(w.integers.const_data_ptr<int8_t>(), s);
    const Decoding epilogue(s, scales.const_data_ptr<float>(), offsets.const_data_ptr<float>(), rest.const_data_ptr<float>(),
                            rest.dim() == 1 ? 0 : s.out_channels);
    Tensor y = at::empty({s.images, s.out_height, s.out_width, s.out_channels}, rest.options());
    const uint8_t* from = integers.const_data_ptr<uint8_t>();
    float* to = y.mutable_data_ptr<float>();
    MomentSums sums(Units(s.images, s.places(), s.out_channels));
    at::parallel_for(0, s.images, 1, [&](int64_t first, int64_t last) {
        Convolution<Decoding> convolution(s, packed.data(), epilogue);
        for (int64_t i = first; i < last; i++) {
            convolution.image(from + i * s.x_size(), to + i * s.places() * s.out_channels);
            if (moments) sums.add_image(to, i);
        }
    });
    if (moments) *moments = std::make_shared<Moments>(sums.moments());
    return y;
}

// [O, K, K, channels] from codes of at least as many channels
Tensor gradient_of_weight(const Tensor& integers, const Tensor& gradient, const Shape& s, const Steps& steps, int64_t channels) {
    Tensor out = at::empty({s.out_channels, s.kernel, s.kernel, s.channels}, integers.options().dtype(at::kFloat));
    (s.kernel == 1 ? weight_gradient<1> : weight_gradient<3>)(integers.const_data_ptr<uint8_t>(), gradient.const_data_ptr<int8_t>(),
                                                              out.mutable_data_ptr<float>(), s, steps, at::get_num_threads());
    return out.narrow(-1, 0, channels).contiguous();
}

struct CodeConvolution : torch::autograd::Function<CodeConvolution> {
    static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                          const Tensor& weight_bits, const Tensor& activation_bits, const Tensor& gradient_bits,
                          const Tensor& step_key, const Tensor& layer_key, Tensor running_zero_point, Tensor running_range,
                          double momentum, bool training, bool stochastic, int64_t stride, int64_t padding,
                          std::shared_ptr<const Moments>* moments) {
        const Tensor from = nhwc(x);
        Shape s{x.size(0), x.size(2), x.size(3), x.size(1), 0, 0, weight.size(0), weight.size(2), stride, padding};
        s.out_height = (s.height + 2 * padding - s.kernel) / stride + 1, s.out_width = (s.width + 2 * padding - s.kernel) / stride + 1;
        const int64_t bits = number(activation_bits);
        float low = running_zero_point.item<float>(), value_range = running_range.item<float>();
        if (training) {
            const Range range = noted_range(x, from.const_data_ptr<float>());
            observe(running_zero_point, running_range, range, momentum);
            low = range.low, value_range = range.high - range.low;
        }
        const Affine affine(low, value_range, bits);
        Weight w = encode_weight(weight, number(weight_bits));
        const Tensor integers = padded(encode(from, affine));
        w.integers = padded(w.integers), s.channels = integers.size(-1);
        context->save_for_backward({integers, w.decoded, gradient_bits, step_key, layer_key});
        context->saved_data["numbers"] = std::vector<double>{affine.scale, affine.zero_point, static_cast<double>(stochastic)};
        context->saved_data["shape"] = std::vector<int64_t>{s.images, s.height, s.width, s.channels, s.out_height, s.out_width,
                                                            s.out_channels, s.kernel, s.stride, s.padding};
        context->saved_data["needed"] = std::vector<int64_t>{x.requires_grad(), weight.requires_grad(), bias.has_value() && bias->requires_grad()};
        const Tensor y = convolve(integers, affine, w, bias.value_or(Tensor()), s, moments);
        at::AutoDispatchBelowADInplaceOrView below;  // not a view, which a ReLU in place could not modify
        return y.movedim(-1, 1);
    }

    static variable_list backward(AutogradContext* context, const variable_list& gradients) {
        TORCH_CHECK(!at::GradMode::is_enabled(), "compute=codes has no second derivative: use compute=simulate");
        const auto saved = context->get_saved_variables();
        const auto numbers = context->saved_data["numbers"].toDoubleVector();
        const auto n = context->saved_data["shape"].toIntVector(), needed = context->saved_data["needed"].toIntVector();
        const Shape s{n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9]};
        const int64_t bits = number(saved[2]);
        const Tensor gradient = nhwc(gradients[0]);
        const Affine affine(noted_range(gradients[0], gradient.const_data_ptr<float>()), bits);
        const Noise noise{numbers[2] != 0, static_cast<uint32_t>(key(saved[3]) ^ key(saved[4])), 0};
        const int64_t channels = saved[1].size(-1);
        const bool sums = needed[0] && sums_input(channels, s), decode = (needed[0] && !sums) || needed[2];
        const auto [quantized, codes] = encode_gradient(gradient, affine, bits, noise, decode);
        const double step = affine.scale, zero = affine.zero_point + static_cast<double>(int64_t{1} << (bits - 1)) * step;
        Tensor of_x, of_weight, of_bias;
        if (needed[1])
            of_weight = gradient_of_weight(saved[0], codes, s, {numbers[0], numbers[1], step, zero}, channels).movedim(-1, 1);
        if (decode) {
            const Tensor like = at::empty({s.images, s.height, s.width, channels}, gradient.options()).movedim(-1, 1);  // for its shape only
            const int64_t out_channels[] = {s.out_channels};
            const auto found = at::convolution_backward(
                quantized.movedim(-1, 1), like, saved[1].movedim(-1, 1), at::OptionalIntArrayRef(out_channels), {s.stride, s.stride},
                {s.padding, s.padding}, {1, 1}, false, {0, 0}, 1, {needed[0] && !sums, false, needed[2] != 0});
            of_x = std::get<0>(found), of_bias = std::get<2>(found);
        }
        if (sums) of_x = input_gradient(codes, saved[1], s.padding, step, zero).movedim(-1, 1);
        variable_list found(16);
        found[0] = of_x, found[1] = of_weight, found[2] = of_bias;
        return found;
    }
};

Tensor convolve_codes(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& weight_bits,
                      const Tensor& activation_bits, const Tensor& gradient_bits, const Tensor& step_key, const Tensor& layer_key,
                      Tensor running_zero_point, Tensor running_range, double momentum, bool training, bool stochastic,
                      int64_t stride, int64_t padding) {
    std::shared_ptr<const Moments> moments;
    const bool before_norm = training && !bias.has_value();  // batch norm follows most convolutions without a bias
    const Tensor y = CodeConvolution::apply(x, weight, bias, weight_bits, activation_bits, gradient_bits, step_key, layer_key,
                                            running_zero_point, running_range, momentum, training, stochastic, stride, padding,
                                            before_norm ? &moments : nullptr);
    if (moments) take_note(y, std::nullopt, moments);
    return y;
}

// Gradient [O, K, K, C] of a weight from the codes x [N, H, W, C] and g [N, H', W', O], both contiguous
Tensor sum_weight_gradient(const Tensor& x, const Tensor& g, int64_t kernel, int64_t stride, int64_t padding, double x_scale,
                           double x_zero, double g_scale, double g_zero) {
    const Tensor codes = padded(x);
    const Shape s{x.size(0), x.size(1), x.size(2), codes.size(3), g.size(1), g.size(2), g.size(3), kernel, stride, padding};
    TORCH_CHECK(s.out_channels % LANES == 0 && s.places() <= MOST_TERMS && (kernel == 1 || kernel == 3));
    return gradient_of_weight(codes, g, s, {x_scale, x_zero, g_scale, g_zero}, x.size(3));
}

}  // namespace
}  // namespace bitcycle

TORCH_LIBRARY_FRAGMENT(bitcycle, library) {
    library.def("convolve_codes", &bitcycle::convolve_codes);
    library.def("input_gradient", &bitcycle::input_gradient);
    library.def("sum_weight_gradient", &bitcycle::sum_weight_gradient);
    library.def("batch_norm", &bitcycle::batch_norm);
    library.def("relu_after_norm", &bitcycle::relu_after_norm);
}
