"""The API of the documents, row by row: each name is there with its signature, its defaults and its keys."""

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import gradtrack
from gradtrack import GradientConfig, GradientManager, IssueSeverity, IssueType
from gradtrack.integrations import training
from tests.training import batch_loss, optimizer_of, small_model


def parameters(target: Any) -> dict[str, Any]:
    """Return the parameters of a function or a class with their defaults."""
    signature = inspect.signature(target)
    return {name: found.default for name, found in signature.parameters.items() if name != "self"}


def default(target: Any, name: str) -> Any:
    """Return a parameter's default; thresholds that were not chosen compare as their number."""
    return parameters(target)[name]


SIGNATURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "S1.1": (
        gradtrack.GradientGainMonitor,
        {"norm_type": "l2", "strict_single_backward": True, "eps": 1e-30},
    ),
    "S2.1": (
        gradtrack.GradientFlowAnalyzer,
        {
            "enable_rnn_analyzer": False,
            "enable_circular_flow_analyser": False,
        },
    ),
    "S2.2": (gradtrack.GradientFlowAnalyzer, {"enable_jacobian": False, "enable_vector_analysis": False}),
    "S2.3": (gradtrack.GradientFlowAnalyzer.analyze, {"steps": 20}),
    "S2.12": (
        gradtrack.RecurrentAnalyzer,
        {
            "enable_jacobian": True,
            "enable_vector_analysis": False,
            "optimal_radius": 0.9,
            "critical_band": 0.15,
            "track_hidden_states": True,
        },
    ),
    "S2.13": (gradtrack.RecurrentAnalyzer.analyze, {"steps": 20}),
    "S2.17": (
        gradtrack.RLPolicyAnalyzer,
        {
            "enable_jacobian": False,
            "enable_vector_analysis": False,
            "min_entropy_threshold": 0.5,
            "min_std_threshold": 0.1,
            "max_std_threshold": 2.0,
            "track_distributions": True,
        },
    ),
    "S2.18": (gradtrack.RLPolicyAnalyzer.analyze, {"steps": 20}),
    "S2.22": (
        gradtrack.TransformerAnalyzer,
        {
            "enable_jacobian": False,
            "enable_vector_analysis": False,
            "min_entropy_threshold": 0.5,
            "min_diversity_threshold": 0.3,
            "track_attention_weights": True,
        },
    ),
    "S2.23": (gradtrack.TransformerAnalyzer.analyze, {"steps": 20}),
    "S4.1": (GradientConfig, {}),
    "S4.9": (GradientManager.step, {"backward": True}),
    "S4.25": (gradtrack.create_gradient_manager, {"max_grad_norm": 1.0}),
    "S4.28": (training.EarlyStoppingConfig, {"patience": 10}),
    "S4.29": (training.LRSchedulerConfig, {"scheduler_type": "cosine"}),
    "S4.30": (
        training.GradientManagementConfig,
        {"enable_gradient_management": True, "max_grad_norm": 1.0, "enable_nan_inf_check": True},
    ),
}

TAKES: dict[str, tuple[Any, str]] = {
    "S1.5": (gradtrack.GradientGainMonitor.norms, ""),
    "S1.6": (gradtrack.GradientGainMonitor.gains, ""),
    "S1.7": (gradtrack.GradientGainMonitor.log_gains, ""),
    "S1.8": (gradtrack.GradientGainMonitor.summary_stats, ""),
    "S1.9": (gradtrack.GradientGainMonitor.report, ""),
    "S1.12": (gradtrack.GradientGainMonitor.reset, ""),
    "S1.13": (gradtrack.GradientGainMonitor.close, ""),
    "S2.4": (gradtrack.GradientFlowAnalyzer.analyze, "input_fn loss_fn steps optimizer"),
    "S2.5": (gradtrack.GradientFlowAnalyzer.print_summary, "issues"),
    "S2.15": (gradtrack.RecurrentAnalyzer.print_summary, "issues dynamics"),
    "S2.19": (gradtrack.RLPolicyAnalyzer.analyze, "action_extractor"),
    "S3.1": (gradtrack.compute_gradient_norm, "gradients"),
    "S3.2": (gradtrack.compute_gradient_stats, "gradients"),
    "S3.3": (gradtrack.detect_gradient_issues, "gradient_history"),
    "S3.4": (gradtrack.clip_gradients, "gradients max_norm"),
    "S3.5": (gradtrack.visualize_layer_gradients, "layer_gradients"),
    "S4.8": (GradientManager, "config"),
    "S4.16": (gradtrack.GradientMonitor.check_gradient_health, "gradients"),
    "S4.17": (gradtrack.GradientMonitor.update_statistics, "gradients"),
    "S4.18": (gradtrack.GradientMonitor.plot_gradient_statistics, "save_path"),
    "S4.19": (gradtrack.GradientClipper.clip_gradients, "model"),
    "S4.20": (gradtrack.NaNInfHandler.check_and_fix_gradients, "model"),
    "S4.21": (gradtrack.NaNInfHandler.check_and_fix_parameters, "model replace_values"),
    "S4.22": (GradientManager.get_training_summary, ""),
    "S4.23": (GradientManager.plot_training_curves, "save_path"),
    "S4.24": (GradientManager.save_training_log, "file_path"),
    "S4.26": (gradtrack.safe_backward, "loss model optimizer gradient_manager"),
    "S4.31": (training.TrainingOptimizer, "early_stopping_config lr_scheduler_config gradient_config optimizer"),
    "S4.32": (training.TrainingOptimizer.optimize_training, "model train_func val_func max_epochs"),
}

KEYS: dict[str, tuple[str, str]] = {
    "S4.10": ("health", "healthy warnings recommendations"),
    "S4.11": ("nan_inf", "nan_count inf_count"),
    "S4.12": ("clipping", "clipped norm_before norm_after coefficient threshold"),
    "S4.13": ("statistics", "total_norm mean std nan_count inf_count"),
}


@pytest.mark.parametrize("row", SIGNATURES)
def test_defaults(row: str) -> None:
    """Every default is the document's."""
    target, expected = SIGNATURES[row]
    assert {name: default(target, name) for name in expected} == expected


@pytest.mark.parametrize("row", TAKES)
def test_arguments(row: str) -> None:
    """Every argument can be passed by the document's name."""
    target, names = TAKES[row]
    assert set(names.split()) <= set(parameters(target))


@pytest.mark.parametrize("row", KEYS)
def test_keys_of_a_step(row: str) -> None:
    """Each part of what a step returns reads like the document's dictionary."""
    part, names = KEYS[row]
    model = small_model()
    info: Mapping[str, Any] = GradientManager().step(model, optimizer_of(model), batch_loss(model))[part]
    assert all(info[name] is not None for name in names.split())


@pytest.mark.parametrize(
    ("row", "attributes"),
    [
        ("recurrent S2.14", "spectral_radius criticality effective_memory_length temporal_decay_rate"),
        (
            "rl_policy S2.20",
            "discrete_entropy_normalized continuous_std_mean entropy_collapse_risk exploration_adequacy",
        ),
        ("transformer S2.24", "attention_entropy_mean attention_sparsity head_diversity rank_collapse_risk"),
    ],
)
def test_attributes_of_the_analyzers(row: str, attributes: str) -> None:
    """What an analyzer returns has the document's attributes."""
    report = gradtrack.registry.analyzers.load(row.split()[0]).report_type
    assert all(hasattr(report, name) or name in report.model_fields for name in attributes.split())


def test_thresholds_show_the_documents_defaults() -> None:
    """Row S2.1: the attributes show the usual thresholds, which act only when they are passed."""
    analyzer = gradtrack.GradientFlowAnalyzer(small_model())
    found = [getattr(analyzer, f"{name}_threshold") for name in ("vanishing", "exploding", "dead", "unstable_cv")]
    assert found == [1e-6, 10.0, 0.9, 3.0]


def test_issue_types_and_severities() -> None:
    """Rows S2.6 to S2.8: the members and what an issue has."""
    assert {"VANISHING", "EXPLODING", "DEAD", "UNSTABLE", "NUMERICAL"} <= set(IssueType.__members__)
    assert {"CRITICAL", "HIGH", "MEDIUM"} <= set(IssueSeverity.__members__)
    assert {"severity", "issue_type", "layer"} <= set(gradtrack.Issue.model_fields)


def test_components_of_a_manager() -> None:
    """Row S4.8: the three components are reached by their names."""
    manager = GradientManager(GradientConfig())
    assert isinstance(manager.monitor, gradtrack.GradientMonitor)
    assert isinstance(manager.clipper, gradtrack.GradientClipper)
    assert isinstance(manager.nan_inf_handler, gradtrack.NaNInfHandler)


@pytest.mark.parametrize("name", ["check_frequency", "max_gradient_history", "grad_log_every_n_steps"])
def test_settings_named_in_tips(name: str) -> None:
    """Rows S0.2 and S4.6: the settings that the documents only mention."""
    assert getattr(GradientConfig(), name) in (1, 100, 1000)


def test_gains_have_the_documented_summary() -> None:
    """Row S1.8: every key of the summary."""
    blocks = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    with gradtrack.GradientGainMonitor(blocks) as monitor:
        torch.autograd.backward(blocks(torch.randn(2, 3)).sum())
        keys = set(monitor.summary_stats())
    floats = {"mean_gain", "min_gain", "max_gain", "mean_log_gain"}
    assert floats | {f"num_{name}" for name in ("amplifying", "damping", "healthy", "vanishing", "missing")} <= keys
