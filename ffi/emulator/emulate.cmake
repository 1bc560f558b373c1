# emulate(<target>) adds two things to a target: the sources of the CUDA backend that need no JAX, compiled as C++, and
# the emulator.
function(emulate target)
  set(ffi_dir "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..")
  set(cuda "${ffi_dir}/cuda")
  set(exchange "${cuda}/dispatch.cu" "${cuda}/combine.cu" "${cuda}/balance.cu" "${cuda}/replicate.cu"
                "${cuda}/start.cu")
  target_sources(
    ${target}
    PRIVATE ${exchange}
            "${cuda}/dispatch_layout.cu"
            "${cuda}/expand.cu"
            "${cuda}/reduce.cu"
            "${cuda}/grouped_matmul/groups.cu"
            "${cuda}/call_order.cc"
            "${cuda}/device_groups.cc"
            "${cuda}/group.cc"
            "${cuda}/group_failures.cc"
            "${cuda}/split_phase.cc"
            "${cuda}/sharing.cc"
            "${ffi_dir}/emulator/adversary.cc"
            "${ffi_dir}/emulator/fiber.cc"
            "${ffi_dir}/emulator/machine.cc"
            "${ffi_dir}/emulator/memory.cc"
            "${ffi_dir}/emulator/network.cc"
            "${ffi_dir}/emulator/runtime.cc"
            "${ffi_dir}/emulator/scheduler.cc"
            "${ffi_dir}/emulator/weak_memory.cc"
            $<TARGET_OBJECTS:${target}_network>)

  # Kernels over a network are compiled from the same sources, in a namespace of their own, so that both kinds fit in one
  # program.
  add_library(${target}_network OBJECT EXCLUDE_FROM_ALL ${exchange} "${cuda}/nvshmem/device.cu"
                                       "${cuda}/nvshmem/network.cc")
  target_compile_definitions(${target}_network PRIVATE JAX_EP_NETWORK jax_ep=jax_ep_over_network)
  set_target_properties(${target}_network PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)

  set_source_files_properties(${exchange} "${cuda}/dispatch_layout.cu" "${cuda}/expand.cu" "${cuda}/reduce.cu"
                              "${cuda}/grouped_matmul/groups.cu" "${cuda}/nvshmem/device.cu"
                              PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-xc++")
  foreach(part ${target} ${target}_network)
    target_compile_definitions(${part} PRIVATE JAX_EP_EMULATOR)
    target_include_directories(${part} PRIVATE "${ffi_dir}/..")
    target_include_directories(${part} SYSTEM BEFORE PRIVATE "${ffi_dir}/emulator/include")
    # Without contraction products and sums are rounded one by one. The disabled warnings are about nvcc's pragmas,
    # fields that kernels set later, and static functions of headers that a kernel does not call.
    target_compile_options(${part} PRIVATE -O1 -ffp-contract=off -Wno-unknown-pragmas -Wno-sign-compare
                                           -Wno-missing-field-initializers -Wno-unused-but-set-variable
                                           -Wno-unused-function -Wno-psabi)
  endforeach()
endfunction()
