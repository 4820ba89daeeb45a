//! The names of kernels that communicate with the devices of other ranks by themselves: they write
//! flags in memory that devices share, and busy-wait for the flags of their peers. No host call
//! shows such a collective.

/// Parts of kernel names, by library. All parts of a row are in the name, mangled or not.
const COMMUNICATING: [&[&str]; 22] = [
    // vLLM, SGLang, AITER: custom all-reduce and quick reduce.
    &["cross_device_reduce"],
    &["allreduce_prototype_twoshot"],
    // torch.distributed._symmetric_memory.
    &["multimem_all_reduce"],
    &["multimem_one_shot"],
    &["multimem_all_gather"],
    &["one_shot_all_reduce"],
    &["two_shot_all_reduce"],
    &["symmetric_memory", "barrier_kernel"],
    &["symmetric_memory", "put_signal_kernel"],
    &["symmetric_memory", "wait_signal_kernel"],
    // TensorRT-LLM and FlashInfer.
    &["oneShotAllReduceKernel"],
    &["twoShotAllReduceKernel"],
    &["owPrecisionTwoShotAllReduceKernel"],
    &["allreduce_fusion_kernel"],
    &["hotAllreduceFusionKernel"],
    // DeepEP.
    &["deep_ep", "dispatch"],
    &["deep_ep", "combine"],
    &["deep_ep", "barrier"],
    // NVSHMEM: operations on a stream, and kernels of users by the types of their arguments.
    &["nvshmem"],
    &["_on_stream_kernel"],
    // NCCL's device API.
    &["ncclDevComm"],
    &["ncclGin"],
];

/// Kernels that a host call of NCCL launches, which shows the collective.
const OF_HOST_CALLS: [&str; 4] = ["ncclDevKernel", "ncclKernel", "ncclSymDevKernel", "ncclSymkDevKernel"];

/// Whether a host call of a collective library launches a kernel, by its name.
#[must_use]
pub fn is_of_host_call(name: &str) -> bool {
    OF_HOST_CALLS.iter().any(|part| name.contains(part))
}

/// Whether a kernel communicates by itself, by its name.
#[must_use]
pub fn communicates(name: &str) -> bool {
    let has = |row: &&[&str]| row.iter().all(|part| name.contains(part));
    !is_of_host_call(name) && COMMUNICATING.iter().any(has)
}

#[cfg(test)]
mod tests {
    use super::communicates;

    #[test]
    fn kernels_of_known_libraries_communicate() {
        for name in [
            "_ZN4vllm26cross_device_reduce_1stageI13__nv_bfloat16Li8EEEvPNS_8RankDataENS_11RankSignalsEPNS_6SignalEPT_ii",
            "sglang::cross_device_reduce_2stage<__half, 4>",
            "(anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>",
            "two_shot_all_reduce_kernel_inplace",
            "_ZN4c10d16symmetric_memoryL18wait_signal_kernelEPPjiiiim",
            "flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1, __nv_bfloat16, 8>",
            "tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8, true, true>",
            "deep_ep::intranode::notify_dispatch<8>",
            "_ZN7deep_ep12internode_ll7combineILb0ELb0ELi7168ELi9EEEvPv",
            "barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>",
            "nvshmemi_signal_wait_until_on_stream_kernel",
            "_Z10my_reducerP15ncclWindow_vidm11ncclDevComm",
        ] {
            assert!(communicates(name), "{name}");
        }
    }

    #[test]
    fn other_kernels_do_not() {
        for name in [
            "",
            "forward_layer_3",
            "at::native::reduce_kernel<512, 1>",
            "block_reduce_one_shot",
            "barrier_kernel",
            "cutlass::dispatch_policy<4>",
            // NCCL's own kernels belong to host calls.
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "_Z29ncclKernel_AllReduce_RING_LLP11ncclDevCommmP8ncclWork",
            "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16",
        ] {
            assert!(!communicates(name), "{name}");
        }
    }
}
