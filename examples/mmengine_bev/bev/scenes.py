"""Street scenes with cars, rendered by casting a ray through every pixel of every camera.

The ego frame has x to the front, y to the left and z up, with its origin on the road under the ego car; metres. A
camera's frame is that of pinhole cameras: x to the right, y down, z along the optical axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SKY = np.array([150.0, 185.0, 230.0])
ASPHALT, GRASS, PAINT = np.array([88.0, 88.0, 92.0]), np.array([86.0, 120.0, 70.0]), np.array([225.0, 225.0, 215.0])
ROAD_HALF_WIDTH, LANE = 7.0, 3.5
HAZE = 60.0
"""Distance at which about two thirds of a colour has turned into the sky's."""


@dataclass(frozen=True)
class Car:
    """A box on the road."""

    x: float
    y: float
    yaw: float
    size: tuple[float, float, float]
    """Length, width, height."""
    colour: Array

    def local(self, points: Array, *, directions: bool = False) -> Array:
        """Points (or directions) of the ego frame in the car's own, whose origin is the box's centre."""
        cos, sin = np.cos(self.yaw), np.sin(self.yaw)
        turned = np.array([[cos, sin, 0.0], [-sin, cos, 0.0], [0.0, 0.0, 1.0]])
        centre = np.array([self.x, self.y, self.size[2] / 2])
        found: Array = (points if directions else points - centre) @ turned.T
        return found


@dataclass(frozen=True)
class Camera:
    """A pinhole camera."""

    intrinsics: Array
    """3 x 3: pixels from directions in the camera's frame."""
    rotation: Array
    """3 x 3: the ego frame from the camera's."""
    position: Array


def surround(count: int, height: int, width: int) -> list[Camera]:
    """``count`` cameras on the roof that together look all around, with a little overlap."""
    view = np.deg2rad(360.0 / count * 1.1)
    focal = width / 2 / np.tan(min(view, np.deg2rad(110.0)) / 2)
    intrinsics = np.array([[focal, 0.0, width / 2], [0.0, focal, height * 0.4], [0.0, 0.0, 1.0]])
    cameras = []
    for yaw in np.arange(count) * 2 * np.pi / count:
        forward = np.array([np.cos(yaw), np.sin(yaw), 0.0])
        right = np.array([np.sin(yaw), -np.cos(yaw), 0.0])
        rotation = np.stack([right, np.array([0.0, 0.0, -1.0]), forward], axis=1)
        cameras.append(Camera(intrinsics, rotation, np.array([0.0, 0.0, 1.6]) + 0.5 * forward))
    return cameras


def make_scene(seed: int, reach: float) -> list[Car]:
    """Cars at random places of a road with four lanes, none of them on top of another or of the ego car."""
    random = np.random.default_rng(seed)
    cars: list[Car] = []
    for _ in range(40):
        lane = random.integers(4)
        x, y = random.uniform(-reach, reach), (lane - 1.5) * LANE + random.normal(0.0, 0.2)
        if max(abs(x) - 5.0, abs(y) - 2.6) < 0 or any(abs(car.x - x) < 6.5 and abs(car.y - y) < 2.6 for car in cars):
            continue
        yaw = (0.0 if lane < 2 else np.pi) + random.normal(0.0, 0.08)
        size = (random.uniform(3.8, 5.2), random.uniform(1.7, 2.0), random.uniform(1.4, 1.9))
        cars.append(Car(x, y, yaw, size, random.uniform(40, 230, 3)))
        if len(cars) == 10:
            break
    return cars


def render(cars: list[Car], camera: Camera, height: int, width: int) -> NDArray[np.uint8]:
    """The picture that a camera takes; 3 x height x width."""
    rows, columns = np.mgrid[0:height, 0:width] + 0.5
    pixels = np.stack([columns.ravel(), rows.ravel(), np.ones(height * width)], axis=1)
    rays = pixels @ np.linalg.inv(camera.intrinsics).T @ camera.rotation.T
    rays /= np.linalg.norm(rays, axis=1, keepdims=True)
    colours, distances = _ground(camera.position, rays)
    for car in cars:
        hit, shade = _box(car, camera.position, rays)
        nearer = hit < distances
        colours[nearer] = car.colour * shade[nearer, None]
        distances[nearer] = hit[nearer]
    clear = np.exp(-distances / HAZE)[:, None]
    picture = colours * clear + SKY * (1 - clear)
    return picture.clip(0, 255).astype(np.uint8).reshape(height, width, 3).transpose(2, 0, 1)


def _ground(origin: Array, rays: Array) -> tuple[Array, Array]:
    """Colours and distances of the road and the grass beside it; the sky is infinitely far."""
    down = rays[:, 2] < -1e-6
    distances = np.where(down, -origin[2] / np.where(down, rays[:, 2], -1.0), np.inf)
    x, y = (origin[axis] + np.where(down, distances, 0.0) * rays[:, axis] for axis in (0, 1))
    beside = np.abs((y + LANE) % LANE - LANE / 2) > LANE / 2 - 0.12
    painted = beside & (np.abs(y) < ROAD_HALF_WIDTH) & ((x % 6.0 < 3.0) | (np.abs(y) > ROAD_HALF_WIDTH - 0.3))
    colours = np.where((np.abs(y) < ROAD_HALF_WIDTH)[:, None], ASPHALT, GRASS)
    return np.where(painted[:, None], PAINT, colours), distances


def _box(car: Car, origin: Array, rays: Array) -> tuple[Array, Array]:
    """Distances at which the rays meet a car (Kay and Kajiya's slabs), and how bright the side is that they meet."""
    start, steps = car.local(origin[None]), car.local(rays, directions=True)
    half = np.array(car.size) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        one, other = (-half - start) / steps, (half - start) / steps
    near, far = np.fmin(one, other), np.fmax(one, other)
    entry, leaving = near.max(axis=1), far.min(axis=1)
    shade = np.array([0.75, 0.6, 1.0])[near.argmax(axis=1)]
    return np.where((entry < leaving) & (entry > 0), entry, np.inf), shade


def occupied(cars: list[Car], reach: float, cells: int) -> NDArray[np.bool_]:
    """Cells that hold a car, of the square of ``2 * reach`` metres around the ego car; cells x cells, x then y."""
    centres = (np.arange(cells) + 0.5) * 2 * reach / cells - reach
    x, y = np.meshgrid(centres, centres, indexing="ij")
    points = np.stack([x.ravel(), y.ravel(), np.zeros(cells * cells)], axis=1)
    found = np.zeros(cells * cells, dtype=bool)
    for car in cars:
        inside = np.abs(car.local(points))[:, :2] <= np.array(car.size[:2]) / 2
        found |= inside.all(axis=1)
    return found.reshape(cells, cells)
