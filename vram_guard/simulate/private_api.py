"""Every private or undocumented name of torch that the trace leans on, in one table.

A release of torch that drops one is named by :func:`check_torch` before anything is traced, and by the test of this
table.
"""

from __future__ import annotations

import functools

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.private_names import PrivateName, missing_names

#: Operators that are followed where they are there.
FLEX_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._higher_order_ops.flex_attention:create_fw_bw_graph", "score_mod is not traced"),
    PrivateName("torch._higher_order_ops.flex_attention:flex_attention", "the kernel of a trace"),
    PrivateName("torch._higher_order_ops.flex_attention:flex_attention_backward", "the kernel of a trace"),
    PrivateName("torch._ops:HigherOrderOperator.python_key_table", "the kernel of a trace"),
)

PRIVATE_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C:TensorBase.device", "the true device behind the simulated one"),
    PrivateName("torch._C:TensorBase.is_meta", "which tensors are symbolic"),
    PrivateName("torch._C:TensorBase.is_cpu", "the true answer for real tensors"),
    PrivateName("torch._C:TensorBase._use_count", "who else holds a gradient"),
    PrivateName("torch._C:TensorBase._is_view", "autocast caches no casts of views"),
    PrivateName("torch._C:TensorBase._make_wrapper_subclass", "wrappers around symbolic tensors"),
    PrivateName("torch._C:_storage_Use_Count", "who else holds a gradient's memory"),
    PrivateName("torch:UntypedStorage._cdata", "one key for all views of a storage"),
    PrivateName("torch._C:Generator._cdata", "which generator an operator draws from"),
    PrivateName("torch._C:_current_autograd_node", "whose backward is running"),
    PrivateName("torch._C._functions:AccumulateGrad._sequence_nr", "which forward made an autograd node"),
    PrivateName("torch._C._autograd:_get_sequence_nr", "which forward made an autograd node"),
    PrivateName(
        "torch.autograd.graph:_engine_run_backward",
        "the frame below which autograd itself calls; where a backward pass begins",
    ),
    PrivateName("torch._C:_ExcludeDispatchKeyGuard", "autocast kernels run below autocast"),
    PrivateName("torch._C:_dispatch_tls_set_dispatch_key_included", "autocast for symbolic tensors"),
    PrivateName("torch._C:_dispatch_tls_is_dispatch_key_included", "autocast for symbolic tensors"),
    PrivateName("torch._C:DispatchKey.AutocastCUDA", "where CUDA's autocast policy is asked"),
    PrivateName("torch._C:_group_tensors_by_device_and_dtype", "foreach for symbolic parameters"),
    PrivateName(
        "torch.distributed.distributed_c10d:_get_default_store", "ranks wait for each other outside of collectives"
    ),
    PrivateName("torch:clear_autocast_cache", "when cached casts die"),
    PrivateName("torch.library:Library._destroy", "kernels are taken away again"),
    PrivateName("torch.utils._python_dispatch:TorchDispatchMode", "every operator is seen"),
    PrivateName(
        "torch.utils.checkpoint:_enable_checkpoint_early_stop",
        "a second forward that has come to its end saves less than the first one",
    ),
    PrivateName(
        "torch.utils.checkpoint:_allowed_determinism_checks_to_fns",
        "what both forwards of a checkpointed block save is compared",
    ),
    PrivateName("torch._compile:_disable_dynamo", "where torch imports its compiler by itself"),
    PrivateName("torch.utils._python_dispatch:_disable_current_modes", "imports run as always, constants are read"),
    PrivateName("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", "whether the step has a mode on"),
    PrivateName("torch._C:DisableTorchFunction", "imports run as always"),
    PrivateName("torch._C:_is_torch_function_mode_enabled", "what modes of functions are told"),
    PrivateName("torch.utils._pytree:tree_map", "batches of any structure"),
    PrivateName("torch.cuda:_lazy_init", "no CUDA context is opened"),
    PrivateName("torch.cuda:_lazy_call", "seeding is not queued for a later context"),
    PrivateName("torch.cuda:_cudart", "a profiler that is switched on and off"),
    PrivateName("torch.cuda.nvtx:_nvtx", "ranges for a profiler, on a build without CUDA"),
    PrivateName("torch:_GLOBAL_DEVICE_CONTEXT", "the default device is put back"),
    PrivateName("torch.utils._device:_device_constructors", "which factories follow the default device"),
    PrivateName("torch.utils._device:DeviceContext", "who names the meta device"),
    PrivateName("torch.overrides:_get_current_function_mode_stack", "who names the meta device"),
    PrivateName("torch.nn:Module._compiled_call_impl", "compiled modules are noticed"),
    PrivateName("torch._C:_swap_tensor_impl", "a script's own tensors become symbolic and stay the same objects"),
)

#: Where torch has them (since 2.9): its new switches for TF32, beside the old ones.
TF32_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C:_get_fp32_precision_getter", "whether float32 products may take TF32"),
    PrivateName("torch._C:_set_fp32_precision_setter", "a trace leaves the switches as they were"),
)

#: Where torch has it (since 2.8).
SAVED_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C._autograd:_top_saved_tensors_default_hooks", "whose hooks pack what is saved"),
)

#: Only for steps whose parameters are kept on the host.
FSDP_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C:StorageBase.resize_", "memory of unsharded parameters comes and goes"),
    PrivateName("torch._subclasses.fake_tensor:FakeTensorMode.__enter__", "shapes are derived, not computed"),
    PrivateName("torch._C:_get_accelerator", "a model is sharded over GPUs"),
    PrivateName("torch.distributed._composable_state:_module_state_mapping", "FSDP forgets a traced model"),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty", "parts of a parameter for many ranks"
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.init_unsharded_param",
        "which memory is a parameter's or a gradient's",
    ),
    PrivateName(
        "torch.testing._internal.distributed.fake_pg:FakeStore", "a process group for one process that opens no socket"
    ),
)

#: Only for steps whose compiled code is followed; a release without one of them counts such steps as eager.
COMPILER_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C:TensorBase._make_subclass", "fake tensors that C++ takes for meta tensors"),
    PrivateName("torch._subclasses.fake_tensor:FakeTensor.fake_device", "the compiler sees CUDA tensors"),
    PrivateName("torch._subclasses.fake_tensor:FakeTensor.__torch_dispatch__", "C++ asks where they lie"),
    PrivateName("torch._subclasses.fake_tensor:FakeTensorMode.from_tensor", "symbolic tensors become fake"),
    PrivateName("torch._subclasses.fake_tensor:FakeTensorMode.__torch_dispatch__", "factories on CUDA"),
    PrivateName("torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init", "constants stay here"),
    PrivateName("torch._decomp:global_decomposition_table", "composites decompose as for CUDA"),
    PrivateName("torch._ops:OpOverload.py_kernels", "composites decompose as for CUDA"),
    PrivateName("torch._ops:OpOverload._dispatch_cache", "composites decompose as for CUDA"),
    PrivateName("torch._C:_dispatch_has_kernel_for_dispatch_key", "composites decompose as for CUDA"),
    PrivateName("torch._dynamo.convert_frame:CatchErrorsWrapper.__call__", "Dynamo runs outside the trace"),
    PrivateName(
        "torch._dynamo.convert_frame:is_in_any_mode_without_ignore_compile_internals",
        "a trace's mode stops no compiler",
    ),
    PrivateName("torch._dynamo.variables.optimizer:OptimizerVariable.call_method", "states are made in a trace"),
    PrivateName("torch._dynamo.variables.optimizer:OptimizerVariable._set_capturable", "counts lie on CUDA"),
    PrivateName("torch._dynamo.guards:CheckFunctionManager.__init__", "each graph is compiled once"),
    PrivateName("torch._dynamo.trace_rules:get_torch_obj_rule_map", "which functions Dynamo knows"),
    PrivateName("torch._dynamo.trace_rules:get_tensor_method", "which methods Dynamo knows"),
    PrivateName("torch._dynamo.trace_rules:clear_lru_cache", "which functions Dynamo knows"),
    PrivateName("torch._guards:GuardsSet.inner", "what a trace looks at compiles nothing anew"),
    PrivateName("torch._guards:Guard.user_stack", "what a trace looks at compiles nothing anew"),
    PrivateName("torch._dynamo.types:ConvertFrameReturn.frame_exec_strategy", "our frames are skipped"),
    PrivateName("torch._C._dynamo.eval_frame:_FrameAction.SKIP", "our frames are skipped"),
    PrivateName("torch._C._dynamo.eval_frame:_FrameExecStrategy", "our frames are skipped"),
    PrivateName("torch._dynamo.utils:counters", "graph breaks"),
    PrivateName("torch._dynamo.device_interface:CudaInterface.Worker", "a CUDA device for Inductor"),
    PrivateName("torch._inductor.compile_fx:_compile_fx_inner", "graphs are counted, and lie on CUDA"),
    PrivateName("torch._inductor.compile_fx:_recursive_joint_graph_passes", "graphs lie on CUDA"),
    PrivateName("torch._inductor.fx_passes.joint_graph:lazy_init", "patterns are made without a GPU"),
    PrivateName("torch._inductor.fx_passes.post_grad:lazy_init", "patterns are made without a GPU"),
    PrivateName("torch._inductor.scheduler:has_triton", "code for Triton is written"),
    PrivateName("torch.utils._triton:triton_hash_with_backend", "code for Triton is written"),
    PrivateName("torch._inductor.codecache:CacheBase.get_system", "no GPU is asked"),
    PrivateName("torch._dynamo.repro.after_aot:save_graph_repro", "no process is started"),
    PrivateName("torch._inductor.codecache:PyCodeCache.write", "generated code"),
    PrivateName("torch._inductor.codecache:PyCodeCache.load_by_key_path", "generated code"),
    PrivateName("torch._inductor.async_compile:AsyncCompile.triton", "kernels are not compiled"),
    PrivateName("torch._inductor.async_compile:AsyncCompile.wait", "kernels are not compiled"),
    PrivateName("torch._inductor.async_compile:AsyncCompile.use_process_pool", "no process is started"),
    PrivateName("torch._inductor.runtime.hints:DeviceProperties.create", "properties are those of a trace"),
    PrivateName("torch._C._dynamo.guards:_empty_strided_cuda", "what generated code allocates"),
    PrivateName("torch.cuda:_DeviceGuard", "generated code runs on a device"),
)

#: Of the compiler too, where they are there: without the first, what runs uncompiled outside the model is not said; the
#: second is needed before torch 2.6; without the third, checkpointed blocks that draw are counted as eager; without the
#: fourth, no such budget is tried.
COMPILER_EXTRAS: tuple[PrivateName, ...] = (
    PrivateName(
        "torch._dynamo.eval_frame:_callback_from_stance", "calls of compiled functions that run uncompiled are noted"
    ),
    PrivateName(
        "torch._dynamo.eval_frame:set_eval_frame", "compiled functions run uncompiled where torch has no stances"
    ),
    PrivateName("torch._prims.rng_prims:graphsafe_run_with_rng_state", "what a checkpointed block draws again"),
)

#: Only for steps over several GPUs, beside :data:`FSDP_NAMES`.
PARALLEL_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch.distributed.distributed_c10d:_world", "groups of a trace's own"),
    PrivateName("torch.distributed.distributed_c10d:_World.pg_map", "groups of a trace's own"),
    PrivateName("torch.distributed.distributed_c10d:_default_pg_init_method", "the default group is as it was"),
    PrivateName("torch._C._distributed_c10d:_unregister_process_group", "groups of a trace's own"),
    PrivateName("torch._C._distributed_c10d:_resolve_process_group", "who takes part in a collective"),
    PrivateName("torch._C._distributed_c10d:ProcessGroup._set_group_desc", "names of mesh dimensions"),
    PrivateName("torch.distributed.tensor:DTensor._op_dispatcher", "caches that know meshes"),
    PrivateName(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator.propagate_op_sharding", "caches that know meshes"
    ),
    PrivateName("torch.distributed.tensor:DTensor._local_tensor", "lists of DTensors"),
    PrivateName("torch.distributed.tensor:DTensor._spec", "lists of DTensors"),
    PrivateName("torch.distributed.tensor._dtensor_spec:DTensorSpec.placements", "lists of DTensors"),
    PrivateName("torch.distributed.tensor._dtensor_spec:TensorMeta", "lists of DTensors"),
    PrivateName("torch.distributed.tensor.parallel.loss:_disable_custom_loss_ops", "losses over cut scores"),
    PrivateName("torch.distributed.tensor._dispatch:OpDispatcher._random_ops", "draws of DTensors"),
    PrivateName("torch.distributed.tensor._random:_rng_tracker", "generators of DTensors"),
    PrivateName("torch.distributed.tensor.parallel.loss:customized_loss_ops", "losses over cut scores"),
)

#: Only for steps that call collectives.
COLLECTIVE_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C._distributed_c10d:FakeWork.boxed", "the handle of a collective that is over"),
    PrivateName("torch._C._distributed_c10d:ProcessGroup.unbox", "the size of a collective's group"),
)

#: Only for DistributedDataParallel, ZeroRedundancyOptimizer and FSDP1, beside the three above.
REDUCER_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C._distributed_c10d:_create_work_from_future", "where C++ looks for a reduced bucket"),
    PrivateName(
        "torch.nn.parallel.distributed:_verify_param_shape_across_processes", "shapes that pretended ranks do not send"
    ),
    PrivateName("torch.nn.parallel:DistributedDataParallel._pre_forward", "a step that is reduced as a whole"),
    PrivateName("torch.nn.parallel:DistributedDataParallel._post_forward", "a step that is reduced as a whole"),
    PrivateName("torch.nn.parallel:DistributedDataParallel._active_ddp_module", "compiled code ends where buckets do"),
    PrivateName("torch._compile:_disable_dynamo", "the wrapper's own code is not compiled"),
    PrivateName("torch._C:StorageBase.data_ptr", "which parameters are views of a flat one"),
    PrivateName(
        "torch.distributed.fsdp._flat_param:FlatParamHandle._alloc_padded_unsharded_flat_param",
        "which memory is a parameter's",
    ),
)


@functools.cache
def check_torch() -> None:
    """Refuse a torch that lacks what the trace needs, before anything is touched.

    Raises:
        UnsupportedStepError: names what is missing.
    """
    missing = missing_names(PRIVATE_NAMES)
    if missing:
        import torch

        raise UnsupportedStepError(
            _(
                "torch {version} has no {names}; use a release that vram_guard was tested with (2.4 to 2.15)",
                version=torch.__version__,
                names=", ".join(name.dotted for name in missing),
            )
        )
