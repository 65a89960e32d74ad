"""The non-stiff problems of DETEST: Hull, Enright, Fellen & Sedgwick 1972, Comparing Numerical Methods for
Ordinary Differential Equations (SIAM J. Numer. Anal. 9), classes A to E, all on [0, 20].

C5, the five outer planets, is left out: its many constants say little more than D about a solver. A field
is ``f(t, y)`` with ``t`` of shape ``(batch,)`` and ``y`` of shape ``(batch, dim)``.
"""

import torch

END = 20.0


def _stack(*columns):
    return torch.stack(columns, dim=-1)


def a1(t, y):
    return -y


def a2(t, y):
    return -0.5 * y**3


def a3(t, y):
    return y * torch.cos(t).unsqueeze(-1)


def a4(t, y):
    return y / 4 * (1 - y / 20)


def a5(t, y):
    t = t.unsqueeze(-1)
    return (y - t) / (y + t)


def b1(t, y):
    p, q = y.unbind(-1)
    return _stack(2 * (p - p * q), -(q - p * q))


def b2(t, y):
    p, q, r = y.unbind(-1)
    return _stack(-p + q, p - 2 * q + r, q - r)


def b3(t, y):
    p, q, _ = y.unbind(-1)
    return _stack(-p, p - q * q, q * q)


def b4(t, y):
    p, q, r = y.unbind(-1)
    radius = torch.hypot(p, q)
    return _stack(-q - p * r / radius, p - q * r / radius, p / radius)


def b5(t, y):
    p, q, r = y.unbind(-1)
    return _stack(q * r, -p * r, -0.51 * p * q)


def linear(matrix):
    def field(t, y):
        return y @ matrix.T

    return field


def _chain(rates):
    """What leaves one compartment arrives in the next; nothing leaves the last."""
    rates = torch.tensor([*rates, 0.0], dtype=torch.float64)
    return linear(torch.diag(-rates) + torch.diag(rates[:-1], -1))


def _diffusion(size):
    ones = torch.ones(size - 1, dtype=torch.float64)
    return linear(torch.diag(ones, 1) + torch.diag(ones, -1) - 2 * torch.eye(size, dtype=torch.float64))


def orbit(t, y):
    position, velocity = y[:, :2], y[:, 2:]
    return torch.cat([velocity, -position / position.norm(dim=1, keepdim=True) ** 3], dim=1)


def _orbit_start(eccentricity):
    return [1 - eccentricity, 0.0, 0.0, ((1 + eccentricity) / (1 - eccentricity)) ** 0.5]


def e1(t, y):
    p, q = y.unbind(-1)
    return _stack(q, -(q / (t + 1) + (1 - 0.25 / (t + 1) ** 2) * p))


def e2(t, y):
    p, q = y.unbind(-1)
    return _stack(q, (1 - p * p) * q - p)


def e3(t, y):
    p, q = y.unbind(-1)
    return _stack(q, p**3 / 6 - p + 2 * torch.sin(2.78535 * t))


def e4(t, y):
    q = y[:, 1]
    return _stack(q, 0.032 - 0.4 * q * q)


def e5(t, y):
    q = y[:, 1]
    return _stack(q, (1 + q * q).sqrt() / (25 - t))


def _unit(size):
    return [1.0] + [0.0] * (size - 1)


#: The problems: field and initial values.
PROBLEMS = {
    "A1": (a1, [1.0]),
    "A2": (a2, [1.0]),
    "A3": (a3, [1.0]),
    "A4": (a4, [1.0]),
    "A5": (a5, [4.0]),
    "B1": (b1, [1.0, 3.0]),
    "B2": (b2, [2.0, 0.0, 1.0]),
    "B3": (b3, [1.0, 0.0, 0.0]),
    "B4": (b4, [3.0, 0.0, 0.0]),
    "B5": (b5, [0.0, 1.0, 1.0]),
    "C1": (_chain([1.0] * 9), _unit(10)),
    "C2": (_chain([float(n) for n in range(1, 10)]), _unit(10)),
    "C3": (_diffusion(10), _unit(10)),
    "C4": (_diffusion(51), _unit(51)),
    **{f"D{n}": (orbit, _orbit_start(e)) for n, e in enumerate((0.1, 0.3, 0.5, 0.7, 0.9), start=1)},
    "E1": (e1, [0.6713967071418030, 0.09540051444747446]),
    "E2": (e2, [2.0, 0.0]),
    "E3": (e3, [0.0, 0.0]),
    "E4": (e4, [30.0, 0.0]),
    "E5": (e5, [0.0, 0.0]),
}
