// What one operator knows about a tensor that it hands to the next: its range, or the moments of its channels.
//
// A note belongs to one tensor object in one version: a copy, a view or a tensor changed in place has none, and the next
// operator computes the same numbers itself. Notes hold no memory of tensors; each thread keeps its latest ones.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <deque>
#include <memory>
#include <optional>

#include "affine.h"

namespace bitcycle {

struct Moments;  // of batch norm

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Note {
    WeakTensor tensor;  // whose address is not reused while it is here
    int64_t version;
    std::optional<Range> range;
    std::shared_ptr<const Moments> moments;
};

inline std::deque<Note>& notes() {
    static thread_local std::deque<Note> latest;
    return latest;
}

inline void take_note(const at::Tensor& x, std::optional<Range> range, std::shared_ptr<const Moments> moments = nullptr) {
    constexpr size_t KEPT = 16;
    if (x.is_inference()) return;  // has no versions
    auto& latest = notes();
    if (latest.size() == KEPT) latest.pop_front();
    latest.push_back({WeakTensor(x.getIntrusivePtr()), x._version(), range, std::move(moments)});
}

inline const Note* note_of(const at::Tensor& x) {
    auto& latest = notes();
    for (auto note = latest.rbegin(); note != latest.rend(); note++)
        if (note->tensor._unsafe_get_target() == x.unsafeGetTensorImpl())
            return x.is_inference() || note->version != x._version() ? nullptr : &*note;
    return nullptr;
}

// The range of x, whose elements are at `elements`; noted if x is the result of an operation, as the memory of other tensors is
// also changed by other libraries, without a new version
inline Range noted_range(const at::Tensor& x, const float* elements) {
    const Note* note = note_of(x);
    if (note && note->range) return *note->range;
    const Range range = range_of(elements, x.numel());
    if (x.grad_fn()) take_note(x, range);
    return range;
}

constexpr int64_t HOT = 1 << 12;  // elements that are still in the cache when their range is taken

// Calls work(first, last) on all elements of y, which it writes, and returns their range
template <class Work>
Range range_after(const float* y, int64_t count, int64_t block, const Work& work) {
    std::vector<Range> parts(at::get_num_threads());
    const int64_t grain = std::max<int64_t>(1, GRAIN / block);
    at::parallel_for(0, (count + block - 1) / block, grain, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const int64_t begin = i * block, end = std::min(count, begin + block);
            work(begin, end);
            parts[at::get_thread_num()].include(serial_range(y + begin, end - begin));
        }
    });
    Range range;
    for (const Range& part : parts) range.include(part);
    return range;
}

}  // namespace bitcycle
