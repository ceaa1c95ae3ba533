"""MoE-Lightning's Hierarchical Roofline Model (its section 3): attainable speed of a computation and what limits it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.hardware.machine import HardwareProfile
from engine.planner.costs import Costs
from engine.planner.plan_parts import RooflinePicture, RooflinePoint
from engine.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Level:
    """A memory and its processor.

    Attributes:
        name: "GPU" or "CPU".
        flops: P_peak, 1 / s.
        bytes_per_s: B_peak, bytes / s.
    """

    name: str
    flops: float
    bytes_per_s: float

    def attainable(self, intensity: float) -> float:
        """Eq. 8: for data in this memory; `intensity` in flops per byte of this memory."""
        return min(self.flops, self.bytes_per_s * intensity)


@dataclass(frozen=True, slots=True)
class HierarchicalRoofline:
    """Two levels and the link between them: i is the card, j the host.

    Attributes:
        upper, lower: levels i and j.
        link: B_peak from j to i, bytes / s.
    """

    upper: Level
    lower: Level
    link: float

    def attainable(self, upper_intensity: float, lower_intensity: float) -> float:
        """Eq. 7: at level i on data fetched from level j.

        Args:
            upper_intensity: I_i, flops per byte read from level i.
            lower_intensity: I_j, flops per byte fetched from level j.
        """
        return min(self.upper.attainable(upper_intensity), self.link * lower_intensity)

    def first_turning_point(self, lower_intensity: float) -> float:
        """Eq. 9, P1: below this intensity it does not pay to move the data from j to i."""
        return self.lower.attainable(lower_intensity) / self.link

    def second_turning_point(self, upper_intensity: float) -> float:
        """Eq. 10, P2: below this intensity the link limits a computation at level i."""
        return self.upper.attainable(upper_intensity) / self.link

    def balance(self, upper_intensity: float) -> float:
        """Eq. 11: the I_j at which the link feeds level i as fast as its own memory does."""
        return self.upper.bytes_per_s * upper_intensity / self.link

    def bottleneck(self, upper_intensity: float, lower_intensity: float) -> str:
        """What limits a computation: "link", "GPU memory" or "GPU arithmetic"."""
        limits = {
            "link": self.link * lower_intensity,
            f"{self.upper.name} memory": self.upper.bytes_per_s * upper_intensity,
            f"{self.upper.name} arithmetic": self.upper.flops,
        }
        return min(limits, key=lambda name: limits[name])


def roofline_of(machine: HardwareProfile) -> HierarchicalRoofline:
    """The roofline of a machine, from its data sheet.

    Raises:
        ValueError: the machine has no graphics card.
    """
    gpu = machine.gpu
    if gpu is None:
        raise ValueError(f"{machine.name} has no graphics card")
    return HierarchicalRoofline(
        upper=Level("GPU", gpu.flops * gpu.count, gpu.bytes_per_s * gpu.count),
        lower=Level("CPU", machine.cpu.flops, machine.cpu.ram_bytes_per_s),
        link=machine.link.h2d * gpu.count,
    )


def operational_intensity(flops: float, nbytes: float) -> float:
    """Definition 3.1, flops per byte; infinite if nothing is read."""
    return flops / nbytes if nbytes > 0 else math.inf


def roofline_picture(costs: Costs, workload: Workload) -> RooflinePicture:
    """The roofline of a machine with a model's experts on it, ready to draw."""
    machine, model = costs.machine, costs.model
    cpu = Level("CPU", machine.cpu.flops, costs.cpu_bytes_per_s)
    width = operational_intensity(2.0 * model.expert_weights, costs.expert_bytes)
    rows = {
        "decode": max(1.0, workload.beams * model.experts_per_token / max(model.experts, 1)),
        "prefill": workload.prompt_tokens * model.experts_per_token / max(model.experts, 1),
    }
    if workload.sequences > 1:
        rows["batch"] = workload.sequences * model.experts_per_token / max(model.experts, 1)
    if machine.gpu is None:
        points = tuple(_on_host(name, cpu, max(each, 1.0) * width) for name, each in rows.items())
        return RooflinePicture(cpu.flops, cpu.bytes_per_s, points=points)
    found = roofline_of(machine)
    roofline = HierarchicalRoofline(found.upper, cpu, found.link)
    points = tuple(
        RooflinePoint(
            name,
            intensity := max(each, 1.0) * width,
            roofline.attainable(intensity, intensity),
            roofline.bottleneck(intensity, intensity),
        )
        # Left of P1 the host computes, at least as fast as the link could feed the card.
        if max(each, 1.0) * width >= roofline.first_turning_point(max(each, 1.0) * width)
        else _on_host(name, cpu, max(each, 1.0) * width)
        for name, each in rows.items()
    )
    return RooflinePicture(
        cpu.flops,
        cpu.bytes_per_s,
        roofline.upper.flops,
        roofline.upper.bytes_per_s,
        roofline.link,
        first_turning_point=roofline.first_turning_point(width),
        second_turning_point=roofline.second_turning_point(width),
        balance=roofline.balance(width),
        points=points,
    )


def _on_host(name: str, cpu: Level, intensity: float) -> RooflinePoint:
    reached = cpu.attainable(intensity)
    return RooflinePoint(name, intensity, reached, "CPU arithmetic" if reached >= cpu.flops else "CPU memory")
