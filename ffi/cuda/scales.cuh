// The scales of fp8 rows, as receivers write them: the forms of ScalesFormat.
#pragma once

#include "ffi/cuda/dispatch.h"
#include "ffi/cuda/warp.cuh"

namespace jax_ep {

__device__ __forceinline__ uint32_t exponent(uint32_t bits_of_float) { return bits_of_float << 1 >> 24; }

// The exponents of four float32 scales that are 0, a power of two, or NaN. The first is in the lowest byte.
__device__ __forceinline__ uint32_t exponents(const uint4& scales) {
  return exponent(scales.x) | exponent(scales.y) << 8 | exponent(scales.z) << 16 | exponent(scales.w) << 24;
}

// Writes into args.out_scales, whose shape depends on args.scales_format: see DispatchArgs.
struct ScalesWriter {
  const DispatchArgs& args;

  // Writes the scales of one chunk of a row. `scales` has four words. If the last chunk has fewer scales, the other
  // words may hold anything.
  __device__ __forceinline__ void write(const uint4& scales, int32_t chunk, int32_t row) const {
    if (args.scales_format == ScalesFormat::kFloat32 && args.num_scales % 4 == 0) {  // each row begins at a whole unit
      const uint64_t unit = uint64_t{static_cast<uint32_t>(row)} * (static_cast<uint32_t>(args.num_scales) / 4);
      static_cast<uint4*>(args.out_scales)[unit + static_cast<uint32_t>(chunk)] = scales;
    } else {
      write_by_format(scales, chunk, row);
    }
  }

  // A warp sets the scales of a row to zero.
  __device__ void zero(int32_t row) const {
#pragma unroll 1
    for (int32_t chunk = lane_id(); chunk < words(); chunk += 32) write(uint4{}, chunk, row);
  }

 private:
  __device__ __forceinline__ void write_by_format(const uint4& scales, int32_t chunk, int32_t row) const {
    switch (args.scales_format) {
      case ScalesFormat::kFloat32:
        return write_four(static_cast<uint32_t*>(args.out_scales) + int64_t{row} * args.num_scales, chunk, scales);
      case ScalesFormat::kFloat32Columns:
        return write_column_of_each(scales, chunk, row);
      case ScalesFormat::kUe8m0:
        return write_bytes(static_cast<uint8_t*>(args.out_scales) + int64_t{row} * args.num_scales, chunk,
                           exponents(scales));
      case ScalesFormat::kUe8m0Columns:
        *in_column(chunk, words(), row) = exponents(scales) & bytes_of_scales(chunk);
    }
  }

  // The words that hold a row's exponents, four in each.
  __device__ int32_t words() const { return (args.num_scales + 3) / 4; }
  __device__ bool is_scale(int32_t i) const { return i < args.num_scales; }
  // The bytes of a chunk's word of exponents that are scales. The other bytes of the last word are 0 in the result.
  __device__ uint32_t bytes_of_scales(int32_t chunk) const {
    const int32_t count = args.num_scales - chunk * 4;
    return count < 4 ? (1u << 8 * count) - 1 : 0xffffffffu;
  }

  // The row's word in a column. The columns of a buffer have `capacity` words each.
  __device__ uint32_t* in_column(int32_t column, int32_t num_columns, int32_t row) const {
    const auto capacity = static_cast<int32_t>(args.capacity);
    const int32_t buffer = has_buffer_per_expert(args.layout) ? row / capacity : 0;
    return static_cast<uint32_t*>(args.out_scales) + (int64_t{buffer} * num_columns + column) * capacity +
           (row - buffer * capacity);
  }

  __device__ __forceinline__ void write_column_of_each(const uint4& scales, int32_t chunk, int32_t row) const {
    const uint32_t each[] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      if (is_scale(chunk * 4 + i)) *in_column(chunk * 4 + i, args.num_scales, row) = each[i];
    }
  }

  __device__ __forceinline__ void write_four(uint32_t* row, int32_t chunk, const uint4& scales) const {
    const uint32_t each[] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      if (is_scale(chunk * 4 + i)) row[chunk * 4 + i] = each[i];
    }
  }

  __device__ __forceinline__ void write_bytes(uint8_t* row, int32_t chunk, uint32_t exponents) const {
    if (args.num_scales % 4 == 0) {  // each row of exponents begins at a whole word
      reinterpret_cast<uint32_t*>(row)[chunk] = exponents;
      return;
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      if (is_scale(chunk * 4 + i)) row[chunk * 4 + i] = static_cast<uint8_t>(exponents >> 8 * i);
    }
  }
};

}  // namespace jax_ep
