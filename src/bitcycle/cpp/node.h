// Nodes of the autograd graph, and gradients that they may change in place.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <type_traits>

namespace bitcycle {

// PyTorch 2.13 stores the reference count in the node, 2.11 uses a shared_ptr
template <class Node>
auto new_node() {
    if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<torch::autograd::Node>>) {
        return std::make_shared<Node>();
    } else {
        return c10::make_intrusive<Node>();
    }
}

// Whether no other reference to the memory of a gradient exists, so that a result may take it; PyTorch's engine asks the same to add in place
inline bool is_ours(const at::Tensor& gradient) {
    return gradient.use_count() == 1 && gradient.has_storage() && gradient.storage().use_count() == 1 &&
           gradient.is_non_overlapping_and_dense() && !at::GradMode::is_enabled();
}

// The batch norm whose output x is, which has no hooks and which no other operation has read; null if there is none
template <class BatchNorm>
BatchNorm* batch_norm_before(const at::Tensor& x) {
    auto* node = at::GradMode::is_enabled() ? dynamic_cast<BatchNorm*>(x.grad_fn().get()) : nullptr;
    const bool fit = node && x.grad_fn().use_count() == 1 && node->saved && !node->rectified && !x.is_view() && node->pre_hooks().empty() && node->post_hooks().empty() &&
                     node->tensor_pre_hooks().empty() && node->retains_grad_hooks().empty();
    return fit ? node : nullptr;
}

// Makes `node` that of x, the output of batch norm that a ReLU has changed in place
template <class Pointer, class BatchNorm>
void take_its_place(const at::Tensor& x, Pointer node, const BatchNorm& before) {
    node->saved = before.saved, node->rectified = true;
    node->set_next_edges(torch::autograd::edge_list(before.next_edges()));
    x.unsafeGetTensorImpl()->bump_version();
    const auto number = node->add_input_metadata(x);
    torch::autograd::impl::rebase_history(x, {node, number});
}

}  // namespace bitcycle
