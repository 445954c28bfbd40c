"""Every private or undocumented name of torch that the trace leans on, in one table.

A release of torch that drops one is named by :func:`check_torch` before anything is traced, and by the test of this
table. The behaviour behind each name is held by the tests named in the last column.
"""

from __future__ import annotations

import functools

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.private_names import PrivateName, missing_names

_LAW = "test_the_symbolic_step_allocates_what_a_real_step_allocates"
_AUTOCAST = "test_autocast_follows_cudas_lists"
_CHECKPOINT = "test_checkpointing_keeps_only_the_blocks_inputs"
_ASKED = "test_a_model_that_asks_its_tensors_where_they_are_is_answered_cuda"
_NAMED = "test_where_a_block_comes_from_is_written_down"
_IN_PLACE = "test_gradients_that_others_hold_are_not_summed_in_place"
_IMPORTED = "test_a_module_that_is_imported_during_a_trace_is_a_real_one"
_META = "test_the_users_own_meta_tensors_take_nothing_and_are_on_the_meta_device"
_PROFILED = "test_ranges_for_a_profiler_stop_no_trace"
_FLEX = "test_compiled_flex_attention_takes_the_same_blocks_where_a_trace_runs_uncompiled"
_MODES = "test_with_a_mode_of_the_step_a_mask_is_added_to_a_copy_of_the_scores"
_FOREACH = "test_foreach_optimizers_hold_copies_of_the_parameters"

#: Operators that are followed where they are there.
FLEX_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._higher_order_ops.flex_attention:create_fw_bw_graph", "score_mod is not traced", _FLEX),
    PrivateName("torch._higher_order_ops.flex_attention:flex_attention", "the kernel of a trace", _FLEX),
    PrivateName("torch._higher_order_ops.flex_attention:flex_attention_backward", "the kernel of a trace", _FLEX),
    PrivateName("torch._ops:HigherOrderOperator.python_key_table", "the kernel of a trace", _FLEX),
)

PRIVATE_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C:TensorBase.device", "the true device behind the simulated one", _ASKED),
    PrivateName("torch._C:TensorBase.is_meta", "which tensors are symbolic", _ASKED),
    PrivateName("torch._C:TensorBase.is_cpu", "the true answer for real tensors", _ASKED),
    PrivateName("torch._C:TensorBase._use_count", "who else holds a gradient", _IN_PLACE),
    PrivateName("torch._C:TensorBase._is_view", "autocast caches no casts of views", _AUTOCAST),
    PrivateName(
        "torch._C:TensorBase._make_wrapper_subclass",
        "wrappers around symbolic tensors",
        "test_8_bit_states_are_traced_as_the_library_allocates_them",
    ),
    PrivateName("torch._C:_storage_Use_Count", "who else holds a gradient's memory", _IN_PLACE),
    PrivateName("torch:UntypedStorage._cdata", "one key for all views of a storage", _LAW),
    PrivateName(
        "torch._C:Generator._cdata",
        "which generator an operator draws from",
        "test_an_impure_block_is_left_out_or_put_back",
    ),
    PrivateName("torch._C:_current_autograd_node", "whose backward is running", _NAMED),
    PrivateName("torch._C._functions:AccumulateGrad._sequence_nr", "which forward made an autograd node", _NAMED),
    PrivateName("torch._C._autograd:_get_sequence_nr", "which forward made an autograd node", _NAMED),
    PrivateName(
        "torch.autograd.graph:_engine_run_backward",
        "the frame below which autograd itself calls; where a backward pass begins",
        _LAW,
    ),
    PrivateName("torch._C:_ExcludeDispatchKeyGuard", "autocast kernels run below autocast", _AUTOCAST),
    PrivateName("torch._C:_dispatch_tls_set_dispatch_key_included", "autocast for symbolic tensors", _AUTOCAST),
    PrivateName("torch._C:_dispatch_tls_is_dispatch_key_included", "autocast for symbolic tensors", _AUTOCAST),
    PrivateName("torch._C:DispatchKey.AutocastCUDA", "where CUDA's autocast policy is asked", _AUTOCAST),
    PrivateName("torch._C:_group_tensors_by_device_and_dtype", "foreach for symbolic parameters", _FOREACH),
    PrivateName(
        "torch.distributed.distributed_c10d:_get_default_store",
        "ranks wait for each other outside of collectives",
        "test_the_group_is_gone_and_both_ranks_end_well",
    ),
    PrivateName("torch:clear_autocast_cache", "when cached casts die", "test_casts_of_weights_are_cached"),
    PrivateName("torch.library:Library._destroy", "kernels are taken away again", "test_a_trace_leaves_nothing_behind"),
    PrivateName("torch.utils._python_dispatch:TorchDispatchMode", "every operator is seen", _LAW),
    PrivateName(
        "torch.utils.checkpoint:_enable_checkpoint_early_stop",
        "a second forward that has come to its end saves less than the first one",
        "test_a_plain_loop_learns_the_same_or_stops_before_the_first_step_that_would_be_another",
    ),
    PrivateName(
        "torch.utils.checkpoint:_allowed_determinism_checks_to_fns",
        "what both forwards of a checkpointed block save is compared",
        "test_a_plain_loop_learns_the_same_or_stops_before_the_first_step_that_would_be_another",
    ),
    PrivateName(
        "torch._compile:_disable_dynamo",
        "where torch imports its compiler by itself",
        "test_a_trace_imports_no_compiler",
    ),
    PrivateName(
        "torch.utils._python_dispatch:_disable_current_modes", "imports run as always, constants are read", _IMPORTED
    ),
    PrivateName(
        "torch.utils._python_dispatch:_get_current_dispatch_mode_stack", "whether the step has a mode on", _MODES
    ),
    PrivateName("torch._C:DisableTorchFunction", "imports run as always", _IMPORTED),
    PrivateName(
        "torch._C:_is_torch_function_mode_enabled",
        "what modes of functions are told",
        "test_a_function_mode_that_is_on_changes_no_place",
    ),
    PrivateName("torch.utils._pytree:tree_map", "batches of any structure", "test_one_example_batch_is_resized"),
    PrivateName("torch.cuda:_lazy_init", "no CUDA context is opened", _ASKED),
    PrivateName("torch.cuda:_lazy_call", "seeding is not queued for a later context", _CHECKPOINT),
    PrivateName("torch.cuda:_cudart", "a profiler that is switched on and off", _PROFILED),
    PrivateName("torch.cuda.nvtx:_nvtx", "ranges for a profiler, on a build without CUDA", _PROFILED),
    PrivateName("torch:_GLOBAL_DEVICE_CONTEXT", "the default device is put back", "test_switches_that_a_step_turns"),
    PrivateName(
        "torch.utils._device:_device_constructors",
        "which factories follow the default device",
        "test_factories_follow_the_default_device_after_a_trace_as_before",
    ),
    PrivateName("torch.utils._device:DeviceContext", "who names the meta device", _META),
    PrivateName("torch.overrides:_get_current_function_mode_stack", "who names the meta device", _META),
    PrivateName("torch.nn:Module._compiled_call_impl", "compiled modules are noticed", "test_compiled_models"),
    PrivateName(
        "torch._C:_swap_tensor_impl",
        "a script's own tensors become symbolic and stay the same objects",
        "test_tensors_become_symbolic_where_they_are",
    ),
)

_TF32 = "test_the_defaults"

#: Where torch has them (since 2.9): its new switches for TF32, beside the old ones.
TF32_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C:_get_fp32_precision_getter", "whether float32 products may take TF32", _TF32),
    PrivateName("torch._C:_set_fp32_precision_setter", "a trace leaves the switches as they were", _TF32),
)

#: Where torch has it (since 2.8).
SAVED_NAMES: tuple[PrivateName, ...] = (
    PrivateName(
        "torch._C._autograd:_top_saved_tensors_default_hooks",
        "whose hooks pack what is saved",
        "test_what_packs_saved_tensors_is_named",
    ),
)

_SHARDED = "test_what_the_trace_allocates_is_the_sequence_of_a_real_run"

#: Only for steps whose parameters are kept on the host.
FSDP_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C:StorageBase.resize_", "memory of unsharded parameters comes and goes", _SHARDED),
    PrivateName("torch._subclasses.fake_tensor:FakeTensorMode.__enter__", "shapes are derived, not computed", _SHARDED),
    PrivateName(
        "torch._C:_get_accelerator",
        "a model is sharded over GPUs",
        "test_a_process_with_a_group_of_its_own_keeps_it_and_a_real_model_is_sharded_after_a_trace",
    ),
    PrivateName(
        "torch.distributed._composable_state:_module_state_mapping",
        "FSDP forgets a traced model",
        "test_a_trace_leaves_the_model_and_torch_as_they_were",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty",
        "parts of a parameter for many ranks",
        "test_more_ranks_than_rows_are_traced_as_quickly",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.init_unsharded_param",
        "which memory is a parameter's or a gradient's",
        "test_the_trace_carries_one_block_at_a_time_and_the_root_with_it",
    ),
    PrivateName(
        "torch.testing._internal.distributed.fake_pg:FakeStore",
        "a process group for one process that opens no socket",
        "test_a_trace_within_a_process_group_leaves_the_group_alone",
    ),
)

_COMPILED = "test_compiled_blocks_take_what_inductors_code_allocates"
_LOSS = "test_a_compiled_loss_keeps_its_gradient"
_KNOWN = "test_after_a_trace_of_a_rank_dynamo_knows_torchs_functions"
_PROCESSES = "test_accelerates_compiled_step_is_shown_beside_the_eager_one"
_FACTORIES = "test_what_a_trace_does_around_factories_compiles_nothing_anew"
_STEPS = "test_the_optimizers_compiled_step_makes_no_tensor_of_its_own_but_counts_steps_on_the_gpu"
_BREAKS = "test_a_graph_break_is_said_and_modules_behind_it_are_compiled"

#: Only for steps whose compiled code is followed; a release without one of them counts such steps as eager.
COMPILER_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C:TensorBase._make_subclass", "fake tensors that C++ takes for meta tensors", _COMPILED),
    PrivateName("torch._subclasses.fake_tensor:FakeTensor.fake_device", "the compiler sees CUDA tensors", _COMPILED),
    PrivateName("torch._subclasses.fake_tensor:FakeTensor.__torch_dispatch__", "C++ asks where they lie", _COMPILED),
    PrivateName("torch._subclasses.fake_tensor:FakeTensorMode.from_tensor", "symbolic tensors become fake", _COMPILED),
    PrivateName("torch._subclasses.fake_tensor:FakeTensorMode.__torch_dispatch__", "factories on CUDA", _COMPILED),
    PrivateName("torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init", "constants stay here", _BREAKS),
    PrivateName("torch._decomp:global_decomposition_table", "composites decompose as for CUDA", _LOSS),
    PrivateName("torch._ops:OpOverload.py_kernels", "composites decompose as for CUDA", _LOSS),
    PrivateName("torch._ops:OpOverload._dispatch_cache", "composites decompose as for CUDA", _LOSS),
    PrivateName("torch._C:_dispatch_has_kernel_for_dispatch_key", "composites decompose as for CUDA", _LOSS),
    PrivateName("torch._dynamo.convert_frame:CatchErrorsWrapper.__call__", "Dynamo runs outside the trace", _COMPILED),
    PrivateName(
        "torch._dynamo.convert_frame:is_in_any_mode_without_ignore_compile_internals",
        "a trace's mode stops no compiler",
        _COMPILED,
    ),
    PrivateName(
        "torch._dynamo.variables.optimizer:OptimizerVariable.call_method", "states are made in a trace", _STEPS
    ),
    PrivateName("torch._dynamo.variables.optimizer:OptimizerVariable._set_capturable", "counts lie on CUDA", _STEPS),
    PrivateName("torch._dynamo.guards:CheckFunctionManager.__init__", "each graph is compiled once", _COMPILED),
    PrivateName("torch._dynamo.trace_rules:get_torch_obj_rule_map", "which functions Dynamo knows", _KNOWN),
    PrivateName("torch._dynamo.trace_rules:get_tensor_method", "which methods Dynamo knows", _KNOWN),
    PrivateName("torch._dynamo.trace_rules:clear_lru_cache", "which functions Dynamo knows", _KNOWN),
    PrivateName("torch._guards:GuardsSet.inner", "what a trace looks at compiles nothing anew", _FACTORIES),
    PrivateName("torch._guards:Guard.user_stack", "what a trace looks at compiles nothing anew", _FACTORIES),
    PrivateName("torch._dynamo.types:ConvertFrameReturn.frame_exec_strategy", "our frames are skipped", _BREAKS),
    PrivateName("torch._C._dynamo.eval_frame:_FrameAction.SKIP", "our frames are skipped", _BREAKS),
    PrivateName("torch._C._dynamo.eval_frame:_FrameExecStrategy", "our frames are skipped", _BREAKS),
    PrivateName("torch._dynamo.utils:counters", "graph breaks", _BREAKS),
    PrivateName("torch._dynamo.device_interface:CudaInterface.Worker", "a CUDA device for Inductor", _COMPILED),
    PrivateName("torch._inductor.compile_fx:_compile_fx_inner", "graphs are counted, and lie on CUDA", _COMPILED),
    PrivateName("torch._inductor.compile_fx:_recursive_joint_graph_passes", "graphs lie on CUDA", _COMPILED),
    PrivateName("torch._inductor.fx_passes.joint_graph:lazy_init", "patterns are made without a GPU", _COMPILED),
    PrivateName("torch._inductor.fx_passes.post_grad:lazy_init", "patterns are made without a GPU", _COMPILED),
    PrivateName("torch._inductor.scheduler:has_triton", "code for Triton is written", _COMPILED),
    PrivateName("torch.utils._triton:triton_hash_with_backend", "code for Triton is written", _COMPILED),
    PrivateName("torch._inductor.codecache:CacheBase.get_system", "no GPU is asked", _COMPILED),
    PrivateName("torch._dynamo.repro.after_aot:save_graph_repro", "no process is started", _PROCESSES),
    PrivateName("torch._inductor.codecache:PyCodeCache.write", "generated code", _COMPILED),
    PrivateName("torch._inductor.codecache:PyCodeCache.load_by_key_path", "generated code", _COMPILED),
    PrivateName("torch._inductor.async_compile:AsyncCompile.triton", "kernels are not compiled", _COMPILED),
    PrivateName("torch._inductor.async_compile:AsyncCompile.wait", "kernels are not compiled", _COMPILED),
    PrivateName("torch._inductor.async_compile:AsyncCompile.use_process_pool", "no process is started", _COMPILED),
    PrivateName("torch._inductor.runtime.hints:DeviceProperties.create", "properties are those of a trace", _COMPILED),
    PrivateName("torch._C._dynamo.guards:_empty_strided_cuda", "what generated code allocates", _COMPILED),
    PrivateName("torch.cuda:_DeviceGuard", "generated code runs on a device", _COMPILED),
)

#: Of the compiler too, where they are there: without the first, what runs uncompiled outside the model is not said; the
#: second is needed before torch 2.6; without the third, checkpointed blocks that draw are counted as eager; without the
#: fourth, no such budget is tried.
COMPILER_EXTRAS: tuple[PrivateName, ...] = (
    PrivateName(
        "torch._dynamo.eval_frame:_callback_from_stance",
        "calls of compiled functions that run uncompiled are noted",
        "test_a_compiled_loss_that_is_not_followed_is_said",
    ),
    PrivateName(
        "torch._dynamo.eval_frame:set_eval_frame",
        "compiled functions run uncompiled where torch has no stances",
        "test_compiled_functions_inside_a_step_run_eagerly",
    ),
    PrivateName(
        "torch._prims.rng_prims:graphsafe_run_with_rng_state",
        "what a checkpointed block draws again",
        "test_checkpointed_blocks_that_draw_are_compiled_too",
    ),
)

_OWN_GROUP = "test_a_process_with_a_group_of_its_own_keeps_it_and_a_real_model_is_sharded_after_a_trace"
_DIMENSIONS = "test_collectives_are_written_down_with_bytes_ranks_and_dimension"
_GENERATORS = "test_draws_of_dtensors_are_traced_and_their_generators_are_as_before"
_SHORT_WAY = "test_events_are_those_of_the_long_way"
_CUT_SCORES = "test_a_loss_over_cut_scores_is_computed_in_parallel_and_its_backward_too"
_TOLD_APART = "test_equal_meshes_of_two_traces_are_told_apart"

#: Only for steps over several GPUs, beside :data:`FSDP_NAMES`.
PARALLEL_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch.distributed.distributed_c10d:_world", "groups of a trace's own", _OWN_GROUP),
    PrivateName("torch.distributed.distributed_c10d:_World.pg_map", "groups of a trace's own", _OWN_GROUP),
    PrivateName(
        "torch.distributed.distributed_c10d:_default_pg_init_method",
        "the default group is as it was",
        "test_nothing_of_torch_is_another_after_a_plan_over_several_gpus",
    ),
    PrivateName("torch._C._distributed_c10d:_unregister_process_group", "groups of a trace's own", _OWN_GROUP),
    PrivateName("torch._C._distributed_c10d:_resolve_process_group", "who takes part in a collective", _DIMENSIONS),
    PrivateName("torch._C._distributed_c10d:ProcessGroup._set_group_desc", "names of mesh dimensions", _DIMENSIONS),
    PrivateName("torch.distributed.tensor:DTensor._op_dispatcher", "caches that know meshes", _TOLD_APART),
    PrivateName(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator.propagate_op_sharding",
        "caches that know meshes",
        _TOLD_APART,
    ),
    PrivateName("torch.distributed.tensor:DTensor._local_tensor", "lists of DTensors", _SHORT_WAY),
    PrivateName("torch.distributed.tensor:DTensor._spec", "lists of DTensors", _SHORT_WAY),
    PrivateName("torch.distributed.tensor._dtensor_spec:DTensorSpec.placements", "lists of DTensors", _SHORT_WAY),
    PrivateName("torch.distributed.tensor._dtensor_spec:TensorMeta", "lists of DTensors", _SHORT_WAY),
    PrivateName(
        "torch.distributed.tensor.parallel.loss:_disable_custom_loss_ops", "losses over cut scores", _CUT_SCORES
    ),
    PrivateName("torch.distributed.tensor._dispatch:OpDispatcher._random_ops", "draws of DTensors", _GENERATORS),
    PrivateName("torch.distributed.tensor._random:_rng_tracker", "generators of DTensors", _GENERATORS),
    PrivateName("torch.distributed.tensor.parallel.loss:customized_loss_ops", "losses over cut scores", _CUT_SCORES),
)

_COLLECTIVES = "test_a_trace_talks_to_no_peer"

#: Only for steps that call collectives.
COLLECTIVE_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._C._distributed_c10d:FakeWork.boxed", "the handle of a collective that is over", _COLLECTIVES),
    PrivateName("torch._C._distributed_c10d:ProcessGroup.unbox", "the size of a collective's group", _COLLECTIVES),
)

_REDUCER = "test_the_reducer_takes_what_it_takes_in_real_processes_in_that_order"
_BY_METHOD = "test_methods_of_the_model_are_reduced_too"
_BUCKETS = "test_under_ddp_graphs_end_where_buckets_do_whoever_calls_the_wrapper"
_FLAT = "test_fsdp1_holds_a_flat_shard_of_each_block_and_frees_with_other_streams"

#: Only for DistributedDataParallel, ZeroRedundancyOptimizer and FSDP1, beside the three above.
REDUCER_NAMES: tuple[PrivateName, ...] = (
    PrivateName(
        "torch._C._distributed_c10d:_create_work_from_future", "where C++ looks for a reduced bucket", _REDUCER
    ),
    PrivateName(
        "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
        "shapes that pretended ranks do not send",
        _REDUCER,
    ),
    PrivateName(
        "torch.nn.parallel:DistributedDataParallel._pre_forward", "a step that is reduced as a whole", _BY_METHOD
    ),
    PrivateName(
        "torch.nn.parallel:DistributedDataParallel._post_forward", "a step that is reduced as a whole", _BY_METHOD
    ),
    PrivateName(
        "torch.nn.parallel:DistributedDataParallel._active_ddp_module", "compiled code ends where buckets do", _BUCKETS
    ),
    PrivateName("torch._compile:_disable_dynamo", "the wrapper's own code is not compiled", _BUCKETS),
    PrivateName("torch._C:StorageBase.data_ptr", "which parameters are views of a flat one", _FLAT),
    PrivateName(
        "torch.distributed.fsdp._flat_param:FlatParamHandle._alloc_padded_unsharded_flat_param",
        "which memory is a parameter's",
        _FLAT,
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
