// One instantiation of CUTLASS's grouped GEMM for Hopper: a persistent, warp-specialized kernel that reads tiles of
// both operands with TMA and takes each group's shape and pointers from device memory.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

#include "ffi/cuda/grouped_matmul/gemms.h"
#include "ffi/cuda/launch.cuh"

namespace jax_ep {

// The memory order of A and B, as CUTLASS names it. D is row-major.
template <GroupedProduct product>
struct Layouts {  // kForward: A = rows, B = w
  using A = cutlass::layout::RowMajor;
  using B = cutlass::layout::RowMajor;
};
template <>
struct Layouts<GroupedProduct::kRowsGradient> {  // A = dy, B = transpose(w)
  using A = cutlass::layout::RowMajor;
  using B = cutlass::layout::ColumnMajor;
};
template <>
struct Layouts<GroupedProduct::kWeightsGradient> {  // A = transpose(rows), B = dy
  using A = cutlass::layout::ColumnMajor;
  using B = cutlass::layout::RowMajor;
};

// The tiles of D. The two consumer warp groups of a block compute tiles by turns ("ping-pong"): while one of them
// multiplies, the other one writes its tile. No blocks form a cluster, because a cluster would pad each group to its
// own shape. These tiles were the fastest of those that were measured (docs/experiments.md).
using LargeTile = cute::Shape<cute::_128, cute::_192, cute::_64>;
// For forward products of few rows per group: has_few_rows() in grouped_matmul.cc.
using SmallTile = cute::Shape<cute::_64, cute::Int<kSmallTileColumns>, cute::_64>;

template <GroupedProduct product, typename Element, typename Tile>
struct GroupedGemm {
  using Shape = cute::Shape<int, int, int>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using LayoutA = typename Layouts<product>::A;
  using LayoutB = typename Layouts<product>::B;
  using LayoutD = cutlass::layout::RowMajor;
  static constexpr int kAlignment = 16 / sizeof(Element);

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutD*, kAlignment, Element, LayoutD*,
      kAlignment, cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA*, kAlignment, Element, LayoutB*, kAlignment,
      float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Shape>, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;
  static_assert(sizeof(Shape) == sizeof(GroupShape));
  static_assert(sizeof(StrideA) == sizeof(int64_t) && sizeof(StrideB) == sizeof(int64_t) &&
                sizeof(StrideD) == sizeof(int64_t));

  static cudaError_t load() { return load_kernel(&cutlass::device_kernel<Kernel>, Kernel::SharedStorageSize); }

  // Returns nullptr, or why the kernel was not launched.
  static const char* run(const GroupArrays& arrays, int32_t num_groups, int32_t device, int32_t num_sms,
                         cudaStream_t stream) {
    cutlass::KernelHardwareInfo hardware;
    hardware.device_id = device;
    hardware.sm_count = num_sms;
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGrouped,
        {num_groups, reinterpret_cast<Shape*>(arrays.shapes), nullptr},
        {reinterpret_cast<const Element**>(arrays.a), reinterpret_cast<StrideA*>(arrays.a_stride),
         reinterpret_cast<const Element**>(arrays.b), reinterpret_cast<StrideB*>(arrays.b_stride)},
        {{},
         nullptr,
         reinterpret_cast<StrideD*>(arrays.d_stride),
         reinterpret_cast<Element**>(arrays.d),
         reinterpret_cast<StrideD*>(arrays.d_stride)},
        hardware};
    arguments.epilogue.thread.alpha = 1.0f;
    arguments.epilogue.thread.beta = 0.0f;
    arguments.scheduler.raster_order = decltype(arguments.scheduler.raster_order)::AlongM;
    if (Gemm::get_workspace_size(arguments) > arrays.gemm_workspace_bytes) return "the workspace is too small";
    Gemm gemm;
    cutlass::Status status = Gemm::can_implement(arguments);
    if (status == cutlass::Status::kSuccess) status = gemm.initialize(arguments, arrays.gemm_workspace, stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
    return status == cutlass::Status::kSuccess ? nullptr : cutlassGetStatusString(status);
  }
};

template <typename Gemm>
constexpr GroupedGemmFunctions functions_of() {
  return {&Gemm::run, &Gemm::load};
}

template <GroupedProduct product, typename Tile>
GroupedGemmFunctions grouped_gemm(GroupedDtype dtype) {
  return dtype == GroupedDtype::kBfloat16 ? functions_of<GroupedGemm<product, cutlass::bfloat16_t, Tile>>()
                                          : functions_of<GroupedGemm<product, cutlass::half_t, Tile>>();
}

}  // namespace jax_ep
